"""The state of a sweep's trials, one row each, stored in the sweep's folder so that it survives the process."""

import csv
import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from eagleray import config
from eagleray.base import files
from eagleray.base.errors import UserError
from eagleray.base.files import read_lines
from eagleray.config import yaml_text
from eagleray.config.plugins import Plugin
from eagleray.runs.command import write_plugins
from eagleray.runs.layout import SWEEP, SWEEP_BEST, SWEEP_COMPARISON, SWEEP_REPORTS, SWEEP_ROWS, SWEEP_TABLE
from eagleray.runs.recipe import Recipe
from eagleray.runs.run_store import run_store
from eagleray.sweeps.sweep import Sweep, count_trials, suggest

DONE = ("finished", "stopped", "failed")  # end states: after all steps, early by the scheduler, with an error
GROWS = ("trials", "hours", "gpus", "out", "register")  # keys of a sweep that may differ when it is continued


class Study:
    """The trials of a sweep: a row in `trials.jsonl` for each trial that was started, and in `reports.jsonl` the
    results that the scheduler received. Only one process writes."""

    def __init__(
        self,
        sweep: Sweep,
        out: str | Path,
        *,
        folder: Path | None = None,
        upload: Callable[[], None] = lambda: None,
        lost: Callable[[], bool] = lambda: False,
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`out` is a folder or URL. `folder` is a copy on this machine, by default the one that `eagleray tune` writes.
        `upload`, which stores the files, is called when a trial has changed its state, and `note` with a line of text
        for each event of a trial. `lost` returns whether another command has taken the sweep over."""
        self.sweep, self.out, self.folder = sweep, str(out), folder or run_store(out).work
        self.name = self.out.rstrip("/").rpartition("/")[2]
        self.upload, self.lost, self.note = upload, lost, note
        self.lock = threading.RLock()
        self.suggested: set[str] = set()  # ids of trials that this process has begun
        self.rows = {r["id"]: r for r in read_lines(self.folder / SWEEP_ROWS)}
        self.reports: dict[str, list[dict[str, Any]]] = {}
        for report in read_lines(self.folder / SWEEP_REPORTS):
            self.reports.setdefault(report["id"], []).append(report)

    @property
    def trials(self) -> str:
        """Return the path or URL of the folder that has the trials' folders."""
        return f"{self.out}/trials"

    def trial(self, name: str) -> str:
        """Return the path or URL of a trial's run."""
        return f"{self.trials}/{name}"

    def next(self) -> dict[str, Any] | None:
        """Return the row of an interrupted trial or, without one, of a new trial; None when no trial is left to begin.
        The row is stored first, so that the trial keeps its values if the sweep continues on another machine."""
        row = self._next()
        if row:
            self.suggested.add(row["id"])
            with self.lock:
                self._write()
            self.upload()
        return row

    def _next(self) -> dict[str, Any] | None:
        with self.lock:
            for row in self.rows.values():
                if row["state"] == "waiting" and row["id"] not in self.suggested:
                    return row
            number = len(self.rows)
            if number >= count_trials(self.sweep):
                return None
            name, values = suggest(self.sweep, number, list(self.rows.values()))
            row = {"id": f"{number:03d}", "alternative": name, "values": values, "state": "waiting"}
            row |= {"step": 0, "starts": 0, "steps": None, "metric": None, "seconds": 0.0, "why": ""}
            self.rows[row["id"]] = row
            return row

    def set(self, name: str, **changes: Any) -> None:
        """Change fields of a trial's row."""
        with self.lock:
            moved = changes.get("state", before := self.rows[name]["state"]) != before
            self.rows[name] |= changes
            self._write()
        if moved:
            self.upload()

    def wait_again(self) -> None:
        """Set all trials that are not done to waiting. Some may be `running` still, since an earlier process ended."""
        with self.lock:
            for row in self.rows.values():
                row["state"] = row["state"] if row["state"] in DONE else "waiting"
            self.suggested.clear()
            self._write()
        self.upload()

    def report(self, name: str, step: int, steps: int, percent: float, value: float) -> None:
        """Store a result of a trial: `value` is the objective, `percent` the percentage of its steps that are done."""
        record = {"id": name, "step": step, "percent": percent, "value": value, "time": round(time.time(), 1)}
        with self.lock:
            self.rows[name] |= {"step": step, "steps": steps, "metric": value}
            self._write()  # first, as a trial that continues repeats a result only if the reports lack it
            files.append_lines(self.folder / SWEEP_REPORTS, [record])
            self.reports.setdefault(name, []).append(record)

    def _write(self) -> None:
        files.write_atomic(self.folder / SWEEP_ROWS, "".join(json.dumps(r) + "\n" for r in self.rows.values()))

    def open_trials(self) -> int:
        """Return how many trials are not done; 0 if the sweep was continued with `trials` set below the number done."""
        with self.lock:
            return max(count_trials(self.sweep) - sum(r["state"] in DONE for r in self.rows.values()), 0)

    def busy(self) -> int:
        """Return the number of trials that this process has begun and that are not done."""
        with self.lock:
            return sum(self.rows[name]["state"] not in DONE for name in self.suggested)

    def best(self) -> dict[str, Any] | None:
        """Return the row with the best objective among the trials that took all their steps."""
        return next(iter(self._best_first(self.rows.values())), None)

    def _best_first(self, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows of trials that took all their steps and have a value, the best objective first."""
        through = [r for r in rows if r["state"] == "finished" and r["metric"] is not None]
        return sorted(through, key=lambda r: r["metric"], reverse=self.sweep.objective.mode == "max")

    def best_of_each(self) -> list[dict[str, Any]]:
        """Return a dictionary for each alternative, the best one first: its name, its number of trials, how many took
        all their steps (`finished`), and the metric, id and values of the best of these trials."""
        sign, found = 1 if self.sweep.objective.mode == "max" else -1, []
        for name in self.sweep.alternatives:
            rows = [r for r in self.rows.values() if r["alternative"] == name]
            through = self._best_first(rows)
            best = through[0] if through else {"metric": None, "id": "", "values": {}}
            kept = {k: best[k] for k in ("metric", "id", "values")}
            found.append({"alternative": name, "trials": len(rows), "finished": len(through)} | kept)
        return sorted(found, key=lambda f: math.inf if f["metric"] is None else -sign * f["metric"])

    def plugins(self) -> list[Plugin]:
        """Return the plug-ins of all recipes of the sweep."""
        trees = [b.recipe for b in self.sweep.alternatives.values() if isinstance(b.recipe, dict)]
        return [Plugin(**entry) for tree in trees for entry in tree.get("plugins") or ()]

    def keys(self) -> list[str]:
        """Return the keys that are varied in any alternative."""
        return list(dict.fromkeys(k for b in self.sweep.alternatives.values() for k in b.space))


def check_same(study: Study) -> None:
    """Raises UserError, with the keys that differ, when the folder holds trials of another sweep."""
    stored = study.folder / SWEEP
    if study.rows and stored.exists():  # another sweep may replace one that has no trials yet
        differ = config.differences(_identity(config.load(Sweep, stored)), _identity(study.sweep))
        if differ:
            raise UserError(f"out={study.out}: holds another sweep: {differ}; give another out=")


def begin(study: Study) -> None:
    """Write sweep.yaml, and the plug-ins of its recipes."""
    files.write_atomic(study.folder / SWEEP, config.dump(study.sweep))
    for place in {study.out, str(study.folder)}:  # best.yaml looks for them in this machine's copy of the sweep, too
        write_plugins(place, study.plugins())


def _identity(sweep: Sweep) -> dict[str, Any]:
    """Return the keys and values of a sweep that must stay the same when it is continued."""
    keys = config.flatten(config.to_plain(sweep))
    return {k.replace("alternatives..", ""): v for k, v in keys.items() if k not in GROWS}


def write_best(study: Study, recipe: Recipe, best: Mapping[str, Any], *, workers: int | str) -> Path:
    """Write best.yaml, the resolved recipe of the best trial, with `out` in the sweep's folder and these `workers`."""
    tree = config.to_plain(recipe) | {"out": f"{study.out}/best", "workers": workers}
    text = f"# Trial {best['id']} of {study.name}: {study.sweep.objective.key} {best['metric']:.6g}.\n"
    path = study.folder / SWEEP_BEST
    files.write_atomic(path, text + yaml_text.dump(tree))
    return path


def write_comparison(study: Study) -> list[Path]:
    """Write alternatives.csv, with a row for each alternative and its best trial, if there are several alternatives."""
    if len(study.sweep.alternatives) < 2:
        return []
    path, keys = study.folder / SWEEP_COMPARISON, study.keys()
    with path.open("w", newline="") as f:
        table = csv.writer(f)
        table.writerow(["alternative", "trials", "finished", study.sweep.objective.key, "id", *keys])
        for one in study.best_of_each():
            *fixed, values = one.values()
            table.writerow([*fixed, *(values.get(k, "") for k in keys)])
    return [path]


def write_table(study: Study) -> Path:
    """Write trials.csv, with a row for each trial."""
    path = study.folder / SWEEP_TABLE
    keys = study.keys()
    fixed = ["id", "alternative", "state", "step", "steps", "metric", "seconds", "why"]
    with path.open("w", newline="") as f:
        table = csv.writer(f)
        table.writerow([*fixed[:2], *keys, *fixed[2:]])
        for row in study.rows.values():
            table.writerow(
                [row["id"], row["alternative"], *(row["values"].get(k, "") for k in keys), *(row[k] for k in fixed[2:])]
            )
    return path
