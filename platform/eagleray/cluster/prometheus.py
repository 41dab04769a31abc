"""Export a run's metrics through Ray, from which Prometheus collects them on every node of a cluster."""

import math
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

from eagleray.runs.background import Background
from eagleray.runs.metrics import METRICS

# Maps the name of each gauge, without PREFIX, to the metric whose values it exports.
GAUGES = {m.gauge: m for m in METRICS.values() if m.gauge}
PROGRESS = "progress_ratio", "Share of the planned steps that have been taken"
PLANNED = "planned_steps", "Planned steps of the run"
WANTED = "wanted_workers", "Smallest number of workers that the run requests, while its command runs"
FINDINGS = "health_findings", "Problems found since this process started, by kind"
PREFIX = "eagleray_"
TAGS = ("run", "method", "user")


class Kept(Background):
    """Gauges of a run that keep their last values until they are closed. Ray drops a value two exports after it was
    set. A run that logs seldom or hangs sets its values less often, so a thread sets them again."""

    seconds = 5.0  # interval at which all values are set again; Ray exports every 10 seconds

    def __init__(self, run: str, method: str, user: str, abouts: Mapping[str, str]) -> None:
        """`run` is the run's full path or URL, as two runs may have the same name, `user` the person who began it, and
        `abouts` has the description of each gauge."""
        from ray.util.metrics import Gauge

        super().__init__("gauges")
        self.tags, self.values = dict(zip(TAGS, (run, method, user), strict=True)), dict[str, float]()
        self.gauges = {name: Gauge(PREFIX + name, what, TAGS) for name, what in abouts.items()}
        self.start()

    def set(self, name: str, value: float) -> None:
        """Set a gauge. Values that are not finite are ignored."""
        if math.isfinite(value):  # a gauge keeps its last finite value; NaN and infinity are health findings
            self.values[name] = value
            self.gauges[name].set(value, self.tags)

    def tick(self) -> None:
        for name, value in list(self.values.items()):
            self.gauges[name].set(value, self.tags)


class Gauges(Kept):
    """The Ray metrics of a run. Rank 0 sets them; Ray exports them from its node with the prefix `ray_eagleray_`."""

    def __init__(self, run: str, method: str, user: str, steps: int) -> None:
        """`steps` is the planned number of steps."""
        from ray.util.metrics import Counter

        abouts = {name: metric.meaning for name, metric in GAUGES.items()} | dict([PROGRESS, PLANNED])
        super().__init__(run, method, user, abouts)
        self.steps, self.findings = steps, Counter(PREFIX + FINDINGS[0], FINDINGS[1], (*TAGS, "kind"))
        self.set(PLANNED[0], steps)

    def update(self, record: Mapping[str, Any]) -> None:
        """Set the metrics that a record has: a line of metrics.jsonl or health.jsonl, or goodput and restarts."""
        for name, metric in GAUGES.items():
            if "kind" not in record and metric.key in record:
                self.set(name, record[metric.key])
        if "kind" in record:
            self.findings.inc(1, self.tags | {"kind": str(record["kind"])})
        elif "step" in record:
            self.set(PROGRESS[0], record["step"] / self.steps)


@contextmanager
def wanted(run: str, method: str, user: str, workers: int) -> Iterator[None]:
    """A context in which this process exports the number of workers that a run asks for. Rank 0's metrics vanish with
    its worker, but this one stays, so a run that waits for machines can be told from one that has ended."""
    with closing(Kept(run, method, user, dict([WANTED]))) as kept:
        kept.set(WANTED[0], workers)
        yield
