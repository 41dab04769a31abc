"""Read what the files in a run's folder say about the run, whether it finished, stopped or failed."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from eagleray.base.errors import UserError, explained
from eagleray.base.files import LARGE, read_history, read_lines, read_metrics
from eagleray.config import yaml_text
from eagleray.evaluation import results
from eagleray.evaluation.results import Result
from eagleray.reports import shapes
from eagleray.reports.choice import Choice
from eagleray.runs import layout, plots
from eagleray.runs.attempts import read_starts
from eagleray.runs.plots import Curve
from eagleray.runs.run_store import run_store
from eagleray.runs.summary import read_summary
from eagleray.storage import store

Source = str | os.PathLike[str]  # also an `eagleray.Run`, which is path-like
LEAVES = (layout.RECIPE, layout.METRICS, layout.SUMMARY, layout.RESULTS)  # a run's folder has at least one of these
LOGGED = re.compile(r"\d{4}-\d\d-\d\d [\d:,]+ rank\d+ ")  # beginning of an entry in train.log
LAST = 15  # number of last lines of the log to show
PARTS = ("method", "backbone", "data", "optim", "evaluate")  # sections of a recipe that reports read


@dataclass(frozen=True)
class Run:
    """The contents of the files in a run's folder. If a file is missing, its field is empty."""

    out: str  # the folder or URL where the run is kept
    folder: Path  # the run's files on this machine
    recipe: dict[str, Any]  # the resolved recipe
    environment: dict[str, Any]
    records: Sequence[dict[str, Any]]  # lines of metrics.jsonl
    summary: dict[str, Any]  # summary.json; empty until the run has finished
    earlier: dict[str, Any]  # summary of an earlier end, if the run was then continued with a larger max_steps
    results: Sequence[Result]
    findings: Sequence[dict[str, Any]]
    starts: Sequence[dict[str, Any]]
    skipped: Sequence[dict[str, Any]]
    quarantine: Sequence[dict[str, Any]]
    state: str  # finished, running, stopped, failed, broken off or not begun
    why: str  # a sentence that explains the state
    log: Sequence[str]  # last lines of train.log
    forecast: dict[str, Any]  # the expected memory and speed of the run
    choice: Choice | None  # which samples the run reads; None if the recipe makes no choice

    @property
    def last(self) -> int:
        """Return the number of steps taken, from metrics.jsonl or, if it is missing, from summary.json."""
        return int(self.records[-1]["step"]) if self.records else int(self.summary.get("steps", 0))

    @property
    def planned(self) -> int | None:
        """Return the number of steps to take; None if neither `max_steps` nor the length of an epoch is known."""
        epochs, most = self.recipe.get("optim", {}).get("epochs"), self.recipe.get("max_steps")
        last = self.records[-1] if self.records else {}
        length = last["step"] / last["epoch"] if last.get("epoch") else 0.0
        if not epochs or not 0 < length < LARGE:
            return most
        all = epochs * round(length)
        return min(all, most or all)

    @cached_property
    def published(self) -> dict[str, float]:
        """Return the scores that the paper reports for this recipe."""
        return results.published(self.environment.get("command", ()), self.recipe)

    @cached_property
    def curves(self) -> dict[str, Curve]:
        """Return the steps and values of each metric in metrics.jsonl, by its key."""
        return plots.read(self.folder) if self.records else {}


def read(url: str) -> Run:
    """Read a run from its folder or s3:// URL. Raises UserError if it fails, Outage if the store does not answer."""
    out = store.absolute(url.rstrip("/") or "/")
    if not store.may_be_folder(out):
        raise UserError(f"{url}: no such folder; expected the folder or s3:// URL of a run")
    folder = run_store(out).fetch(layout.PICTURES)
    if not any((folder / name).exists() for name in LEAVES):
        raise UserError(f"{url}: not the folder of a run: it has none of {', '.join(LEAVES)}")
    records = read_metrics(folder / layout.METRICS)
    summary, starts = read_summary(folder), read_starts(folder / layout.STARTS)
    goes_on = "steps" in summary and summary["steps"] < (records[-1]["step"] if records else 0)
    log = _lines(folder / layout.LOG)
    state, why = state_of(out, folder, records, summary, starts, log)
    choice = _json(folder / layout.CHOICE, {})
    return Run(
        out=out,
        folder=folder,
        recipe=_yaml(folder / layout.RECIPE),
        environment=_checked(shapes.Environment, folder / layout.ENVIRONMENT),
        records=records,
        summary={} if goes_on else summary,
        earlier=summary if goes_on else {},
        results=results.load(out),
        findings=shapes.complete(shapes.Finding, read_history(folder / layout.HEALTH), folder / layout.HEALTH),
        starts=starts,
        skipped=shapes.complete(shapes.Skipped, read_history(folder / layout.SKIPPED), folder / layout.SKIPPED),
        quarantine=shapes.complete(shapes.Bad, read_lines(folder / layout.QUARANTINE), folder / layout.QUARANTINE),
        state=state,
        why=why,
        log=log[-LAST:],
        forecast=_checked(shapes.Forecast, folder / layout.FORECAST),
        choice=shapes.check(Choice, choice, folder / layout.CHOICE) if choice else None,
    )


def state_of(
    out: str,
    folder: Path,
    records: Sequence[Mapping[str, Any]],
    summary: Mapping[str, Any],
    starts: Sequence[Mapping[str, Any]],
    log: Sequence[str],
) -> tuple[str, str]:
    """Return the state of a run, as far as its files show it, and a sentence that explains the state."""
    last = records[-1]["step"] if records else 0
    if run_store(out).is_claimed():
        return "running", f"The run is training, and had taken {last:,} steps when this page was written."
    if summary.get("steps", -1) >= last and layout.EVALUATION_STARTS not in summary:
        return "finished", ""
    if (failure := failure_of(out)) is not None:
        return "failed", failure
    if not starts and not records:
        return "not begun", "The run has not taken a step yet."
    if starts and "ended" in starts[-1]:
        return "stopped", f"The run stopped at step {last:,}; the same command continues it."
    if error := last_error(log):
        return "failed", f"{error}; the same command continues it."
    return "broken off", f"The run was killed some time after step {last:,}; the same command continues it."


def failure_of(out: str) -> str | None:
    """Return why the run has failed for good, or None if no reason is stored. Raises UserError for a damaged file."""
    note, where = run_store(out).get(layout.FAILURE), f"{out}/{layout.FAILURE}"
    return shapes.check(shapes.Failure, _parsed(note, where), where).why if note else None


def last_error(log: Sequence[str]) -> str:
    """Return the error at the end of a log: the last line of its traceback, or "" if the log does not end with one."""
    heads = [i for i, line in enumerate(log) if LOGGED.match(line)]
    if heads and " ERROR " in log[heads[-1]]:
        return log[-1] if log[-1] != log[heads[-1]] else log[-1].partition(" ERROR ")[2]
    return ""


def names(outs: Sequence[str]) -> list[str]:
    """Return a short name for each run: the last parts of its path, as many as are needed for all names to differ.
    Raises UserError when a run is given twice."""
    parts = [out.rstrip("/").split("/") for out in outs]
    for n in range(1, max(map(len, parts)) + 1):
        short = ["/".join(p[-n:]) for p in parts]
        if len(set(short)) == len(short):
            return short
    twice = next(out for out, p in zip(outs, parts, strict=True) if parts.count(p) > 1)
    raise UserError(f"{twice}: given twice")


def _json(path: Path, missing: Any) -> Any:
    content = _parsed(path.read_bytes(), path) if path.exists() else missing
    if not isinstance(content, type(missing)):
        raise UserError(f"{path}: expected a JSON object, got a {type(content).__name__}")
    return content


def _parsed(text: str | bytes, where: Path | str) -> Any:
    with explained(f"{where}: not valid JSON", ValueError, RecursionError):
        return json.loads(text)


def _checked(kind: type, path: Path) -> dict[str, Any]:
    content: dict[str, Any] = _json(path, {})
    if content:
        shapes.check(kind, content, path)
    return content


def _yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml_text.parse(path.read_text()) if path.exists() else {}
    except (yaml.YAMLError, UnicodeDecodeError):
        raise UserError(f"{path}: not valid YAML") from None
    except ValueError as e:
        raise UserError(f"{path}: {e}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path}: expected a recipe, a mapping of keys to values, got a {type(tree).__name__}")
    tree = {k: v for k, v in tree.items() if v is not None or k not in PARTS}
    if isinstance(tree.get("method"), str):  # recipes written by hand may have the short form, a name
        tree["method"] = {"name": tree["method"]}
    shapes.check(shapes.Recipe, tree, path)
    return tree


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").rstrip("\n").split("\n") if path.exists() else []
