"""Write and serve HTML pages about runs and sweeps, and list runs."""

import os
from collections.abc import Sequence
from pathlib import Path

from eagleray.base.errors import UserError
from eagleray.base.numbers_given import whole
from eagleray.reports import listing, write
from eagleray.reports.listing import Listed
from eagleray.reports.watch import Watch
from eagleray.runs.metrics import full_name

Source = str | os.PathLike[str]  # a Run is one, too


def report(runs: Source | Sequence[Source], out: str | Path | None = None) -> list[str]:
    """Write one HTML page about a run, a sweep, or several runs compared, and return where it is.

    `runs` are `Run`s, folders or s3:// URLs. The page is `report.html` in the run's folder, or in the working folder
    for several runs, unless `out` names another file; a run in a store gets a copy there. Raises UserError and Outage.

    Example:

        [page] = eagleray.report("runs/a")
        assert page.endswith("report.html")
    """
    several = [runs] if isinstance(runs, str | os.PathLike) else runs
    if not several:
        raise UserError("runs=[]: expected a run, a sweep, or several runs")
    return write.report([os.fspath(r) for r in several], Path(out) if out else None)


def watch(run: Source, port: int = 0) -> Watch:
    """Serve the page about a run or a sweep for browsers on this machine, drawn anew every ten seconds while the run
    goes on, and return the server: its `url`, and `close`.

    `run` is a `Run`, a folder or an s3:// URL; a `port` of 0 is any free one. Raises UserError and Outage.

    Example:

        with eagleray.watch("runs/a") as page:
            print("open", page.url)
    """
    return Watch(os.fspath(run), whole("port", port, 0, 65535))


def list_runs(folder: str | Path = ".", metric: str = "knn/top1", *, best: str = "") -> list[Listed]:
    """Return the runs in a folder or s3:// URL: state, steps, and the best and newest value of one number of
    metrics.jsonl, such as `knn/top1`, in short `knn`. The newest run comes first; `best` names a number instead of
    `metric` by which the best run comes first. Raises UserError and Outage.

    Example:

        for run in eagleray.list_runs("runs", best="knn"):
            print(run.name, run.state, run.best)
    """
    metric = full_name(best or metric)
    found = listing.list_runs(str(folder), metric)
    return listing.by_score(found, metric) if best else found
