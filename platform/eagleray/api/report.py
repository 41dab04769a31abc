"""Write HTML pages about runs and sweeps, and list runs."""

import os
from collections.abc import Sequence
from pathlib import Path

from eagleray.reports import listing, write
from eagleray.reports.listing import Listed

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
    return write.report([os.fspath(r) for r in several], Path(out) if out else None)


def list_runs(folder: str | Path = ".", metric: str = "knn/top1", *, best: bool = False) -> list[Listed]:
    """Return the runs in a folder or s3:// URL: state, steps, and the best and newest value of one number of
    metrics.jsonl. The newest run comes first or, with `best`, the one with the best value. Raises UserError and Outage.

    Example:

        for run in eagleray.list_runs("runs", best=True):
            print(run.name, run.state, run.best)
    """
    found = listing.list_runs(str(folder), metric)
    return listing.by_score(found, metric) if best else found
