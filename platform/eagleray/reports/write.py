"""Write a report as an HTML file, with its curves as PNGs in a folder of the same name."""

from collections.abc import Sequence
from pathlib import Path

from eagleray.base import files
from eagleray.base.errors import UserError
from eagleray.reports import compare, sections, sweep
from eagleray.reports.page import render
from eagleray.reports.read import read
from eagleray.runs import remote
from eagleray.storage import store
from eagleray.storage.store import is_remote

NAME = "report.html"


def report(given: Sequence[str], out: Path | None = None) -> list[str]:
    """Write the report of a run or a sweep into its folder, or a comparison of several runs into the working folder.
    `out` names another file. Returns the paths that were written: the file, and for a run in a store also the copy
    there. Raises UserError, and Outage when the store does not answer."""
    if out and out.suffix != ".html":
        raise UserError(f"--out {out}: expected a name that ends with .html")
    swept = [Path(g) for g in given if not is_remote(g) and (Path(g) / "sweep.yaml").exists()]
    if swept and len(given) > 1:
        raise UserError(f"{swept[0]}: a sweep cannot be compared with others; its trials can: {swept[0]}/trials/*")
    runs = [] if swept else [read(g) for g in given]
    beside = swept[0].resolve() if swept else runs[0].folder if len(runs) == 1 else Path.cwd()
    path = out or beside / NAME
    folder = path.with_suffix("")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if swept:
            made = sweep.page(beside)
        else:
            made = sections.page(runs[0], folder) if len(runs) == 1 else compare.page(runs, folder)
        files.write_atomic(path, render(made))
    except OSError as e:
        raise UserError(f"{path}: cannot be written: {e.strerror or e}") from None
    finally:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    if out or not runs or not is_remote(runs[0].out) or len(runs) > 1:
        return [str(path)]
    remote.write_note(runs[0].out, NAME, path.read_text())
    for picture in sorted(folder.glob("*.png")):
        store.put_bytes(f"{runs[0].out}/{folder.name}/{picture.name}", picture.read_bytes())
    return [str(path), f"{runs[0].out}/{NAME}"]
