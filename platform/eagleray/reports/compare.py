"""Compare several runs on one page: their curves in shared plots, their costs, and how results and recipes differ."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eagleray import config
from eagleray.base.errors import UserError
from eagleray.evaluation.results import Result, format_settings
from eagleray.reports import plots
from eagleray.reports.page import Page, Picture, Section, Table, footer_text
from eagleray.reports.read import Run, names
from eagleray.reports.sections import all_scores, data_text, figures, latest_results, model_text
from eagleray.runs import metrics

# Maps results of the throughput protocol, over which accuracies are drawn, to labels of the x axes.
AXES = {
    "throughput/images_per_s": "images/s of a forward pass",
    "throughput/params_m": "million parameters",
    "throughput/gmacs": "1e9 multiply-adds of an image",
}
MEASURED = ("size", "batch", "device", "precision", "threads")  # settings of a measurement on which images/s depend
TIMES = (metrics.WALL_SECONDS, metrics.GOODPUT, metrics.RESTARTS)


def page(runs: Sequence[Run], folder: Path) -> Page:
    """Return the page that compares several runs, and write PNGs of its curves into a folder. Raises UserError when a
    run is given twice, or when there are more runs than colours and line styles can distinguish."""
    if len(runs) > plots.MOST:
        raise UserError(
            f"{len(runs)} runs: one page can show at most {plots.MOST}; the curves of more could not be told apart"
        )
    named = dict(zip(names([r.out for r in runs]), runs, strict=True))
    epochs = len({r.recipe.get("optim", {}).get("batch") for r in runs}) > 1
    text = ["The curves are drawn over epochs, as the runs have different batch sizes."] if epochs else []
    if len({r.recipe.get("method", {}).get("name") for r in runs}) > 1:
        text.append("Losses of different methods are not comparable.")
    sections = [
        Section("Runs", [states(named)]),
        Section("Results", results(named), ["Top-1 and top-5 are in percent."]),
        Section(
            "Cost",
            [*hours(named), *figures(list(accuracy_over_cost(named, folder)))],
            ["Accuracy is drawn over speed and size for runs that the throughput protocol has measured."],
        ),
        Section("Curves", figures(plots.compared(named, folder, epochs=epochs)), text),
        Section(
            "Recipes",
            differences(named),
            ["Keys whose values are not the same in all runs; defaults are compared too."],
        ),
    ]
    return Page(
        title=" against ".join(named) if len(named) < 4 else f"{len(named)} runs",
        lead=[],
        sections=[s for s in sections if s.blocks],
        footer=footer_text(", ".join(r.out for r in runs)),
    )


def states(runs: Mapping[str, Run]) -> Table:
    """Return a table with one row per run: method and backbone, data, state, number of steps, number of findings, and
    number of bad samples."""
    rows = [
        [name, model_text(r), data_text(r), r.state, r.last, len(r.findings), len(r.quarantine)]
        for name, r in runs.items()
    ]
    return Table("What is compared", ["Run", "What", "Data", "State", "Steps", "Findings", "Bad samples"], rows)


def results(runs: Mapping[str, Run]) -> list[Table]:
    """Return tables with a row per score or time and a column per run. Scores measured with different settings cannot
    be compared, so they are in separate tables."""
    tables: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for name, run in runs.items():
        for m in all_scores(run):
            table = tables.setdefault(m.key, {})
            for key, value, _, before, _ in m.rows:
                table.setdefault(key, {})[name] = value
                if before is not None:
                    table.setdefault(f"{key}, untrained", {})[name] = before
    times = {k: {n: r.summary[k] for n, r in runs.items() if k in r.summary} for k in TIMES}
    tables["Time", ""] = {k: values for k, values in times.items() if values}
    return [
        Table(title, ["Number", *runs], [[key, *map(values.get, runs)] for key, values in table.items()])
        for (title, _), table in tables.items()
        if table
    ]


def differences(runs: Mapping[str, Run]) -> list[Table]:
    """Return a table of the recipe keys whose values are not the same in all runs."""
    flat = [flattened(run.recipe) for run in runs.values()]
    keys = [k for k in dict.fromkeys(k for f in flat for k in f) if k != "out"]
    differ = [k for k in keys if any(f.get(k, ...) != flat[0].get(k, ...) for f in flat)]
    rows = [[k, *("null" if (v := f.get(k, "not there")) is None else v for f in flat)] for k in differ]
    return [Table("What differs in the recipes", ["Key", *runs], rows)] if rows else []


def flattened(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's values by dotted key. Items of a list of mappings, such as the views, have their index in the
    key: `views.0.size`."""
    return config.flatten({k: _counted(v) for k, v in recipe.items()})


def _counted(value: Any) -> Any:
    """Return a value in which each list of mappings is replaced by a mapping from index to item."""
    if isinstance(value, Mapping):
        return {k: _counted(v) for k, v in value.items()}
    if isinstance(value, list) and any(isinstance(v, Mapping) for v in value):
        return {str(i): _counted(v) for i, v in enumerate(value)}
    return value


def hours(runs: Mapping[str, Run]) -> list[Table]:
    """Return a table of what the training of each run took: its hours, the hours of all workers together, and both for
    100 epochs (MoCo v3, table 3)."""
    rows = []
    for name, run in runs.items():
        seconds, epochs = run.summary.get(metrics.WALL_SECONDS), run.summary.get("epochs")
        ranks = {s["ranks"] for s in run.starts if "ranks" in s}
        first = next((s["step"] for s in run.starts if "step" in s), 0)  # above 0 with start.what=all
        if epochs and 0 < first < run.summary.get("steps", 0):
            epochs *= 1 - first / run.summary["steps"]
        if not seconds:
            continue
        spent, workers = seconds / 3600, ranks.pop() if len(ranks) == 1 else None
        hundred = spent * 100 / epochs if epochs else None
        together = spent * workers if workers else None
        devices = run.environment.get("gpus") or ["CPU"]
        rows.append([name, devices[0], workers, spent, together, hundred, hundred and workers and hundred * workers])
    columns = ["Run", "Device", "Workers", "Hours", "Worker hours", "Hours per 100 epochs", "Worker hours per 100"]
    return [Table("What training took", columns, rows)] if rows else []


def accuracy_over_cost(runs: Mapping[str, Run], folder: Path) -> Iterator[Picture]:
    """Yield a picture for each top-1 accuracy and each axis of AXES of which two or more runs have values, and write it
    to the folder as a PNG (EsViT, figure 1; MoCo v3, figures 7 and 8)."""
    costs = {name: cost for name, run in runs.items() if (cost := throughput_of(run))}
    alike = len({format_settings(at) for at in map(conditions, costs.values())}) == 1
    for heading, key, scores in accuracies(runs):
        for axis, label in AXES.items():
            if axis == "throughput/images_per_s" and not alike:  # speeds under different conditions cannot be compared
                continue
            points = [
                plots.Point(
                    name, str(runs[name].recipe.get("method", {}).get("name", "?")), costs[name].numbers[axis], score
                )
                for name, score in scores.items()
                if name in costs and axis in costs[name].numbers
            ]
            if len(points) > 1:
                yield plots.scatter(points, label, f"{key}, %", heading, folder)


def throughput_of(run: Run) -> Result | None:
    """Return the latest result of the throughput protocol for a run, or None if there is none."""
    return next((r for r in reversed(latest_results(run)) if r.protocol == "throughput"), None)


def conditions(result: Result) -> Mapping[str, object]:
    """Return the settings of a throughput result on which the measured speed depends."""
    return {key: result.settings.get(key) for key in MEASURED}


def accuracies(runs: Mapping[str, Run]) -> Iterator[tuple[str, str, dict[str, float]]]:
    """Yield, for each accuracy, how it was measured, its key, and its values by run. Values with the same key that were
    measured in different ways cannot be compared, so they are yielded separately."""
    found: dict[tuple[tuple[str, str], str], tuple[str, str, dict[str, float]]] = {}
    for name, run in runs.items():
        for scores in all_scores(run):
            for key, value, *_ in scores.rows:
                if key.endswith("/top1"):
                    found.setdefault((scores.key, key), (scores.heading, key, {}))[2][name] = value
    yield from found.values()
