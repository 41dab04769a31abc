"""Write a report as an HTML file, with its curves as PNGs in a folder of the same name."""

import os
from collections.abc import Sequence
from pathlib import Path

from eagleray.base import files
from eagleray.base.errors import UserError
from eagleray.reports import compare, sections, sweep
from eagleray.reports.page import render
from eagleray.reports.read import Source, read
from eagleray.runs import layout, mlflow_run
from eagleray.runs.layout import SWEEP_ROWS
from eagleray.runs.run_store import run_store
from eagleray.runs.tracking import tracking_of
from eagleray.storage import store
from eagleray.sweeps.sweep_dir import sweep_folder

NAME = "report.html"
ENDED = {"stopped": "KILLED", "broken off": "KILLED", "failed": "FAILED"}  # maps states of a run to those of MLflow


def report(runs: Source | Sequence[Source], out: str | Path | None = None) -> list[str]:
    """Write one HTML page about a run or a sweep, or one that compares several runs. Return where it is stored.

    `runs` is a `Run`, a folder or an s3:// URL, or a list of several. `out` names the HTML file. By default the file is
    `report.html` in the run's folder, or in the working folder for several runs. If the run is in object storage and
    `out` is not set, the page is also stored with the run. Raises UserError and Outage.

    Example:

        [page] = eagleray.report("runs/a")
        assert page.endswith("report.html")
    """
    urls = [os.fspath(run) for run in ([runs] if isinstance(runs, str | os.PathLike) else runs)]
    if not urls:
        raise UserError("runs=[]: expected a run, a sweep, or several runs")
    if out:
        out = Path(out)
        files.check_local("--out", out)
        if out.suffix != ".html":
            raise UserError(f"--out {out}: expected a name that ends with .html")
    sweeps = [(g.rstrip("/"), folder) for g in urls if (folder := sweep_folder(g.rstrip("/")))]
    if sweeps and len(urls) > 1:
        url, folder = sweeps[0]
        trials = sweep.trials(url, len(files.read_lines(folder / SWEEP_ROWS)))
        raise UserError(f"{url}: a sweep cannot be compared with others; its trials can: {trials}")
    found = [] if sweeps else [read(g) for g in urls]
    for run in found:
        if run.state in ENDED:
            mend(run.out, run.folder, ENDED[run.state])
    for name, folder in sweeps:
        mend_sweep(store.absolute(name), folder)
    beside = sweeps[0][1].absolute() if sweeps else found[0].folder if len(found) == 1 else Path.cwd()
    path = out or beside / NAME
    folder = path.with_suffix("")
    try:
        with files.writing(str(path)):
            folder.mkdir(parents=True, exist_ok=True)
            if sweeps:
                content = sweep.page(beside, store.absolute(sweeps[0][0]), folder)
            else:
                content = sections.page(found[0], folder) if len(found) == 1 else compare.page(found, folder)
            files.write_atomic(path, render(content))
    finally:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    if out or len(sweeps) + len(found) != 1:
        return [str(path)]
    place = run_store(store.absolute(sweeps[0][0]) if sweeps else found[0].out)
    for written in (path, *([] if sweeps else sorted(folder.glob("*.png")))):
        place.share(written)
    return list(dict.fromkeys([str(path), f"{place.out}/{NAME}"]))


def mend(out: str, folder: Path, status: str) -> None:
    """Tell MLflow with which `status` a run or a sweep has ended, because one that was killed could not do so. `folder`
    holds the file with its id in MLflow."""
    note = folder / layout.MLFLOW
    if note.exists() and mlflow_run.mend(tracking_of(folder), note, status):
        run_store(out).share(note)


def mend_sweep(out: str, folder: Path) -> None:
    """Tell MLflow that a sweep and its trials on this machine have ended, except those that a process still runs."""
    for place in (folder, *sorted(folder.glob("trials/*"))):
        where, held = (out, layout.COMMAND) if place == folder else (str(place), layout.OWNER)
        if not run_store(where).is_claimed(held):
            mend(where, place, "KILLED")
