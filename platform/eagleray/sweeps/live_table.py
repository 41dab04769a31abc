"""Show a sweep's trials in a live table on a terminal, otherwise by a line per event."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.live import Live
from rich.table import Table

from eagleray.base.console import out, say
from eagleray.base.files import Tail, history, parse_lines
from eagleray.base.progress import seconds_left
from eagleray.base.text import aligned
from eagleray.runs import layout
from eagleray.runs.layout import SWEEP_BEST
from eagleray.sweeps.label_free import agreement
from eagleray.sweeps.study import Study
from eagleray.sweeps.sweep import count_trials, in_words

ROWS = 24  # largest number of rows of the live table
ORDER = ("running", "waiting", "finished", "stopped", "failed")


class Show:
    """A context that shows the trials of a study. Calling the context updates the table."""

    def __init__(self, study: Study) -> None:
        self.study, self.live = study, Live(console=out, auto_refresh=False, transient=True)
        self.began: dict[str, tuple[float, int]] = {}  # time.monotonic() and step when a trial was first seen running
        self.tails: dict[str, Tail] = {}  # metrics.jsonl of trials that were seen running
        self.steps: dict[str, int] = {}  # newest step of each trial, from its metrics.jsonl

    def __enter__(self) -> "Show":
        if out.is_terminal:
            self.live.start()
        else:
            self.study.note = say
        return self

    def __exit__(self, *_: object) -> None:
        if out.is_terminal:
            self.live.stop()

    def __call__(self) -> None:
        if out.is_terminal:
            self.live.update(self.table(), refresh=True)

    def table(self) -> Table:
        """Return a table of the first ROWS trials: running ones, then waiting ones, then the others."""
        study, keys = self.study, self.study.keys()
        with study.lock:
            rows = [dict(r) for r in study.rows.values()]
        table = Table(title=f"{study.name}: {count_trials(study.sweep)} trials, {states(rows)}", title_justify="left")
        several = len(study.sweep.alternatives) > 1
        for name in ["trial", *["alternative"] * several, *short(keys), "step", study.sweep.objective.key]:
            table.add_column(name)
        table.add_column("state")
        table.add_column("ETA", justify="right")
        for row in sorted(rows, key=lambda r: (ORDER.index(r["state"]), r["id"]))[:ROWS]:
            live = self.look(row)
            values = [in_words(row["values"].get(k)) for k in keys]
            metric = "" if row["metric"] is None else f"{row['metric']:.4g}"
            steps = f"{live['step']}/{row['steps'] or '?'}"
            named = [row["alternative"]] * several
            table.add_row(row["id"], *named, *values, steps, metric, row["state"] + live["why"], live["eta"])
        return table

    def look(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return a trial's step, ETA and reason of failure. The step of a running trial comes from its metrics.jsonl
        or, if that is not on this machine, from its last report."""
        if row["state"] != "running":
            return {"step": row["step"], "eta": "", "why": f": {row['why'][:60]}" if row["why"] else ""}
        path = self.study.folder / "trials" / row["id"] / layout.METRICS
        tail = self.tails.setdefault(row["id"], Tail(path, whole=True))
        for line in history(parse_lines(tail.lines())[-1:]):
            self.steps[row["id"]] = line["step"]
        step = self.steps.get(row["id"], row["step"])
        at, start = self.began.setdefault(row["id"], (time.monotonic(), step))
        eta = ""
        if step > start and row["steps"]:
            eta = f"{seconds_left(step, row['steps'], start=start, seconds=time.monotonic() - at):.0f} s"
        return {"step": step, "eta": eta, "why": ""}


def short(keys: list[str]) -> list[str]:
    """Return column titles for dotted keys: the fewest last parts of each key that no other key ends with. A final
    `.value` is left out."""
    titles = []
    for key in keys:
        parts = key.removesuffix(".value").split(".")
        others = [k.removesuffix(".value").split(".") for k in keys if k != key]
        n = next((n for n in range(1, len(parts)) if all(o[-n:] != parts[-n:] for o in others)), len(parts))
        titles.append(".".join(parts[-n:]))
    return titles


def states(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return a text on how many trials are in each state."""
    counts = Counter(r["state"] for r in rows)
    return ", ".join(f"{counts[s]} {s}" for s in ORDER if counts[s])


def comparison(study: Study) -> list[str]:
    """Return the lines of a table with a row for each alternative of the sweep and its best trial."""
    keys = study.keys()
    rows = [("ALTERNATIVE", "FINISHED", study.sweep.objective.key, "TRIAL", *short(keys))]
    for one in study.best_of_each():
        metric, values = in_words(one["metric"]) or "none", [in_words(one["values"].get(k)) for k in keys]
        rows.append((one["alternative"], f"{one['finished']} of {one['trials']}", metric, one["id"], *values))
    return list(aligned(rows))


def conclude(study: Study, files: list[Path]) -> None:
    """Print the counts, the best trial and the paths of the results; on a terminal also why trials failed."""
    out.print(f"{count_trials(study.sweep)} trials: {states(study.rows.values())}", markup=False)
    for row in study.rows.values():
        if row["state"] == "failed" and out.is_terminal:
            out.print(f"trial {row['id']} failed: {row['why']}", markup=False)
    if len(study.sweep.alternatives) > 1:
        for line in comparison(study):
            out.print(line, markup=False, highlight=False, soft_wrap=True)
    if best := study.best():
        values = " ".join(f"{k}={in_words(v)}" for k, v in best["values"].items())
        out.print(
            f"best      trial {best['id']} {best['alternative']} {values}: {study.sweep.objective.key} "
            f"{best['metric']:.4g}\n"
            f"again     OMP_NUM_THREADS={study.sweep.cpus} eagleray pretrain {study.folder / SWEEP_BEST}",
            markup=False,
        )
    else:
        out.print("no trial took all its steps, so there is no best one", markup=False)
    if agreed := agreement(study.rows.values()):
        out.print(agreed.line(), markup=False)
    out.print(f"results   {study.out}: {', '.join(p.name for p in files)}", markup=False)
