"""A run's numbers as Ray metrics, which Prometheus collects from every node of a cluster."""

import math
from collections.abc import Mapping
from typing import Any

from eagleray.runs.metrics import METRICS

# The name without the prefix, and the metric that it shows.
GAUGES = {m.gauge: m for m in METRICS.values() if m.gauge}
PROGRESS = "progress_ratio", "Share of the planned steps that was taken"
PLANNED = "planned_steps", "Steps that the run is to take"
FINDINGS = "health_findings", "What was found wrong since this process began, by kind"
PREFIX = "eagleray_"
TAGS = ("run", "method")


class Gauges:
    """Set by rank 0. Ray sends them from the node of that process, under names that begin with `ray_eagleray_`."""

    def __init__(self, run: str, method: str, steps: int) -> None:
        """`run` is the name of the run's folder; `steps` is how many are planned."""
        from ray.util.metrics import Counter, Gauge

        self.tags, self.steps = {"run": run, "method": method}, steps
        abouts = {name: metric.meaning for name, metric in GAUGES.items()} | dict([PROGRESS, PLANNED])
        self.gauges = {name: Gauge(PREFIX + name, what, TAGS) for name, what in abouts.items()}
        self.findings = Counter(PREFIX + FINDINGS[0], FINDINGS[1], (*TAGS, "kind"))
        self._set(PLANNED[0], steps)

    def update(self, record: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl or health.jsonl, or what is known of the restarts; other keys are passed over."""
        for name, metric in GAUGES.items():
            if "kind" not in record and metric.key in record:
                self._set(name, record[metric.key])
        if "kind" in record:
            self.findings.inc(1, self.tags | {"kind": str(record["kind"])})
        elif "step" in record:
            self._set(PROGRESS[0], record["step"] / self.steps)

    def _set(self, name: str, value: float) -> None:
        if math.isfinite(value):  # a loss that is not stays where it was, and the health findings say so
            self.gauges[name].set(value, self.tags)


def exported() -> set[str]:
    """The names under which Prometheus finds them."""
    return {f"ray_{PREFIX}{name}" for name in (*GAUGES, PROGRESS[0], PLANNED[0])} | {f"ray_{PREFIX}{FINDINGS[0]}_total"}
