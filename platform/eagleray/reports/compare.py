"""Several runs on one page: their curves over each other, and what differs in their results and recipes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagleray import config
from eagleray.base.errors import UserError
from eagleray.reports import plots
from eagleray.reports.page import Page, Section, Table, signed
from eagleray.reports.read import Run, names
from eagleray.reports.sections import about, figures, measured, what
from eagleray.runs import metrics

TIMES = (metrics.WALL_SECONDS, metrics.GOODPUT, metrics.RESTARTS)


def page(runs: Sequence[Run], folder: Path) -> Page:
    """The comparison; PNGs of its curves are left in the folder. Raises UserError for a run that is given twice, and
    for more runs than can be told from each other."""
    if len(runs) > plots.MOST:
        raise UserError(f"{len(runs)} runs: their curves cannot be told from each other; expected {plots.MOST} at most")
    named = dict(zip(names([r.out for r in runs]), runs, strict=True))
    epochs = len({r.recipe.get("optim", {}).get("batch") for r in runs}) > 1
    text = ["Over epochs, as the runs differ in their batch."] if epochs else []
    if len({r.recipe.get("method", {}).get("name") for r in runs}) > 1:
        text.append("Losses of different methods are not comparable.")
    sections = [
        Section("Runs", [states(named)]),
        Section("Results", results(named), ["Top-1 and top-5 are in percent."]),
        Section("Curves", figures(plots.compared(named, folder, epochs=epochs)), text),
        Section("Recipes", differences(named), ["Keys that are not the same in all of them, every default included."]),
    ]
    return Page(
        title=" against ".join(named) if len(named) < 4 else f"{len(named)} runs",
        lead=[],
        sections=[s for s in sections if s.blocks],
        footer=signed(", ".join(r.out for r in runs)),
    )


def states(runs: Mapping[str, Run]) -> Table:
    rows = [[name, what(r), about(r), r.state, r.last, len(r.findings), len(r.quarantine)] for name, r in runs.items()]
    return Table("What is compared", ["Run", "What", "Data", "State", "Steps", "Findings", "Bad samples"], rows)


def results(runs: Mapping[str, Run]) -> list[Table]:
    """Tables with a row for every number that any of them has; the same number with other settings is in another."""
    found: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for name, run in runs.items():
        for m in measured(run):
            table = found.setdefault(m.key, {})
            for key, value, before, _ in m.rows:
                table.setdefault(key, {})[name] = value
                if before is not None:
                    table.setdefault(f"{key}, untrained", {})[name] = before
    times = {k: {n: r.summary[k] for n, r in runs.items() if k in r.summary} for k in TIMES}
    found["Time", ""] = {k: values for k, values in times.items() if values}
    return [
        Table(said, ["Number", *runs], [[key, *map(values.get, runs)] for key, values in table.items()])
        for (said, _), table in found.items()
        if table
    ]


def differences(runs: Mapping[str, Run]) -> list[Table]:
    flat = [flattened(run.recipe) for run in runs.values()]
    keys = [k for k in dict.fromkeys(k for f in flat for k in f) if k != "out"]
    differ = [k for k in keys if any(f.get(k, ...) != flat[0].get(k, ...) for f in flat)]
    rows = [[k, *("null" if (v := f.get(k, "not there")) is None else v for f in flat)] for k in differ]
    return [Table("What differs in the recipes", ["Key", *runs], rows)] if rows else []


def flattened(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys of a recipe, with the numbers of its views and sources among them."""
    return config.flatten({k: _counted(v) for k, v in recipe.items()})


def _counted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _counted(v) for k, v in value.items()}
    if isinstance(value, list) and any(isinstance(v, Mapping) for v in value):
        return {str(i): _counted(v) for i, v in enumerate(value)}
    return value
