"""List the runs in a folder or a bucket, each with its state, its steps, and its newest and best score."""

import logging
import math
import os
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from eagleray.base.errors import UserError
from eagleray.reports.read import Run, read
from eagleray.runs import layout
from eagleray.runs.metrics import METRICS, full_name
from eagleray.storage import store

log = logging.getLogger(__name__)
DEPTH = 4  # levels of folders below the given one that are searched for runs


@dataclass(frozen=True)
class Listed:
    """The entry of a run in a list. A score that the run does not have is None."""

    name: str  # path of the run's folder, relative to the folder that is listed
    method: str
    state: str  # the state that a report shows; "damaged" if a file cannot be read
    step: int
    steps: int | None  # number of planned steps
    best: float | None
    last: float | None
    changed: datetime | None  # UTC time of the newest start or end


def list_runs(folder: str | Path = ".", metric: str = "knn/top1", *, best: str = "") -> list[Listed]:
    """List the runs in a folder or s3:// URL with their states and steps, and one metric's best and newest values.

    `metric` is a name in metrics.jsonl such as `knn/top1`, which may be shortened to `knn`. The newest run comes first.
    `best` names a metric to show instead of `metric`. With `best`, the run with the best value comes first. A run with
    an unreadable file has the state "damaged", and the log says why. Raises UserError and Outage.

    Example:

        for run in eagleray.list_runs("runs", best="knn"):
            print(run.name, run.state, run.best)
    """
    url, metric = str(folder), full_name(best or metric)
    if metric not in METRICS:
        raise UserError(f"{metric}: no metric of runs; choose one of {', '.join(sorted(METRICS))}")
    root = store.absolute(url.rstrip("/") or "/")
    found = [_entry(out, root, metric) for out in sorted(run_folders(root))]
    if not found:
        raise UserError(f"{url}: no runs there; expected a folder with runs up to {DEPTH} folders below it")
    found.sort(key=lambda run: run.changed or datetime.min.replace(tzinfo=UTC), reverse=True)
    return by_score(found, metric) if best else found


def by_score(runs: list[Listed], metric: str) -> list[Listed]:
    """Return runs sorted by their best value of the metric, the best first; runs without a value are last."""
    sign = -1 if METRICS[metric].better == "lower" else 1
    return sorted(runs, key=lambda run: (run.best is not None, sign * (run.best or 0)), reverse=True)


def run_folders(root: str) -> Iterator[str]:
    """Yield the folder or URL of each run in the folder `root`. Raises UserError when there is no such folder."""
    if not store.may_be_folder(root):
        raise UserError(f"{root}: no such folder; expected one with runs in it")
    last = None
    for folder, names in folders_with(root, (layout.RECIPE, layout.ENVIRONMENT), DEPTH):
        inside = last is not None and folder.startswith(f"{last}/")  # folders within a run's folder are not runs
        if _is_run(folder, names) and not inside:
            yield (last := folder)


def _is_run(folder: str, names: Collection[str]) -> bool:
    """Return whether a folder with files of these names is a run, and not the copy of its files that MLflow keeps."""
    copy = folder.endswith("/artifacts") and layout.ENVIRONMENT not in names
    return layout.RECIPE in names and not copy


def _entry(out: str, root: str, metric: str) -> Listed:
    try:
        return listed(read(out), root, metric)
    except (UserError, OSError) as e:
        log.warning("%s", e)
        return Listed(os.path.relpath(out, root), "", "damaged", 0, None, None, None, None)


def listed(run: Run, root: str, metric: str) -> Listed:
    """Return the entry of a run in the list of the folder `root`."""
    pick = min if METRICS[metric].better == "lower" else max
    values = [float(r[metric]) for r in [*run.records, run.summary] if metric in r]
    finite = [v for v in [*values, float(run.earlier.get(metric, math.nan))] if math.isfinite(v)]
    return Listed(
        name=os.path.relpath(run.out, root),
        method=_part(run.recipe, "method"),
        state=run.state,
        step=run.last,
        steps=run.planned,
        best=pick(finite) if finite else None,
        last=values[-1] if values else None,
        changed=datetime.fromtimestamp(run.starts[-1]["time"], UTC) if run.starts else None,
    )


def _part(recipe: dict[str, Any], part: str) -> str:
    return str(recipe.get(part, {}).get("name", ""))


def folders_with(root: str, names: Collection[str], depth: int) -> Iterator[tuple[str, list[str]]]:
    """Yield the folders up to `depth` levels below `root` that have a file of these `names`, with the names found. A
    folder comes before its subfolders. The search does not go below a local folder that has all the names."""
    if folder := store.folder_of(root):
        found = {}
        for parent, folders, files in os.walk(folder):
            found[parent] = [name for name in files if name in names]
            if len(found[parent]) == len(names) or parent.removeprefix(str(folder)).count(os.sep) >= depth:
                folders.clear()
    else:
        found = defaultdict(list)
        for blob in store.store(root).walk(f"{root}/"):
            parent, _, name = blob.url.rpartition("/")
            if name in names and parent.removeprefix(root).count("/") <= depth:
                found[parent].append(name)
    yield from sorted(((p, held) for p, held in found.items() if held), key=lambda item: f"{item[0]}/")
