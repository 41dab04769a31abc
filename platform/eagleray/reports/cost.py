"""Compare what several runs took with what they reached: hours, and accuracy over speed and size."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from eagleray.evaluation.results import Result, format_settings
from eagleray.reports import plots
from eagleray.reports.page import Picture, Table
from eagleray.reports.read import Run
from eagleray.reports.sections import all_scores, latest_results
from eagleray.runs import metrics

# Numbers of the throughput protocol that accuracies are drawn over, and their axes.
AXES = {
    "throughput/images_per_s": "images/s of a forward pass",
    "throughput/params_m": "million parameters",
    "throughput/gmacs": "1e9 multiply-adds of an image",
}
MEASURED = ("size", "batch", "device", "precision", "threads")  # settings on which images/s depend


def hours(runs: Mapping[str, Run]) -> list[Table]:
    """Return a table with what the training of each run took: hours, hours of all workers together, and hours for a
    hundred epochs (MoCo v3, table 3)."""
    rows = []
    for name, run in runs.items():
        seconds, epochs = run.summary.get(metrics.WALL_SECONDS), run.summary.get("epochs")
        ranks = {s["ranks"] for s in run.starts if "ranks" in s}
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
    """Yield a picture for every top-1 accuracy and every axis that two or more runs have, and write each as a PNG into
    the folder (EsViT, figure 1; MoCo v3, figures 7 and 8)."""
    costs = {name: cost for name, run in runs.items() if (cost := throughput_of(run))}
    alike = len({format_settings(at) for at in map(conditions, costs.values())}) == 1
    for heading, key, scores in accuracies(runs):
        for axis, label in AXES.items():
            if axis == "throughput/images_per_s" and not alike:  # another device or batch is not comparable
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


def method_of(run: Run) -> str:
    """Return the name of a run's method."""
    return str(run.recipe.get("method", {}).get("name", "?"))


def throughput_of(run: Run) -> Result | None:
    """Return the latest result of the throughput protocol of a run."""
    return next((r for r in reversed(latest_results(run)) if r.protocol == "throughput"), None)


def conditions(result: Result) -> Mapping[str, object]:
    """Return the settings on which a measured speed depends."""
    return {key: result.settings.get(key) for key in MEASURED}


def accuracies(runs: Mapping[str, Run]) -> Iterator[tuple[str, str, dict[str, float]]]:
    """Yield how an accuracy was measured, its key, and the runs that have it: only what was measured in the same way
    can be compared."""
    found: dict[tuple[tuple[str, str], str], tuple[str, str, dict[str, float]]] = {}
    for name, run in runs.items():
        for scores in all_scores(run):
            for key, value, *_ in scores.rows:
                if key.endswith("/top1"):
                    found.setdefault((scores.key, key), (scores.heading, key, {}))[2][name] = value
    yield from found.values()
