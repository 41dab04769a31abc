"""Export a run's numbers as Ray metrics, which Prometheus collects from every node of a cluster."""

import math
from collections.abc import Mapping
from typing import Any

from eagleray.runs.metrics import METRICS

# The name without the prefix, and the metric that it shows.
GAUGES = {m.gauge: m for m in METRICS.values() if m.gauge}
PROGRESS = "progress_ratio", "Share of the planned steps that have been taken"
PLANNED = "planned_steps", "Planned steps of the run"
FINDINGS = "health_findings", "Problems found since this process started, by kind"
PREFIX = "eagleray_"
TAGS = ("run", "method")


class Gauges:
    """The Ray metrics of a run, which rank 0 sets. Ray exports them from the node of rank 0, under names that begin
    with `ray_eagleray_`."""

    def __init__(self, run: str, method: str, steps: int) -> None:
        """`run` is the name of the run's folder; `steps` is how many are planned."""
        from ray.util.metrics import Counter, Gauge

        self.tags, self.steps = {"run": run, "method": method}, steps
        abouts = {name: metric.meaning for name, metric in GAUGES.items()} | dict([PROGRESS, PLANNED])
        self.gauges = {name: Gauge(PREFIX + name, what, TAGS) for name, what in abouts.items()}
        self.findings = Counter(PREFIX + FINDINGS[0], FINDINGS[1], (*TAGS, "kind"))
        self._set(PLANNED[0], steps)

    def update(self, record: Mapping[str, Any]) -> None:
        """Set the metrics from a line of metrics.jsonl or health.jsonl, or from goodput and restarts. Other keys are
        ignored."""
        for name, metric in GAUGES.items():
            if "kind" not in record and metric.key in record:
                self._set(name, record[metric.key])
        if "kind" in record:
            self.findings.inc(1, self.tags | {"kind": str(record["kind"])})
        elif "step" in record:
            self._set(PROGRESS[0], record["step"] / self.steps)

    def _set(self, name: str, value: float) -> None:
        """Set a gauge. A value that is not finite is ignored."""
        if math.isfinite(value):  # a loss that is not stays where it was, and the health findings say so
            self.gauges[name].set(value, self.tags)


def exported() -> set[str]:
    """Return the names of the metrics as Prometheus sees them."""
    return {f"ray_{PREFIX}{name}" for name in (*GAUGES, PROGRESS[0], PLANNED[0])} | {f"ray_{PREFIX}{FINDINGS[0]}_total"}
