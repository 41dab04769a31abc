"""Detect from a run's metrics what goes wrong: collapse, uniform output, instability, frozen weights, wrong images.

docs/health.md gives the reason for each threshold.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from eagleray.runs.metrics import LOSS_SCALE, MONITOR_KNN
from eagleray.runs.spikes import Spikes

LOOKS = 3  # what may pass is a problem after this many measurements in a row
LATE = 6  # features that were never spread have collapsed after this many in a row
SETTLED = 0.2  # below this share of the highest learning rate, nothing may have been learnt yet, or nothing more is
GRACE = 2  # measurements at the start at which features may still be as the random weights made them

FAILED_EVALUATION = "failed evaluation"
LOST_START = "start lost"
BELOW, EQUAL = "below untrained", "not above untrained"
BELOW_START = "below the start"
AT_END = (BELOW, EQUAL, BELOW_START)  # findings of the evaluation at the end
DIP = 5  # measurements of the kNN monitor before one of them may be a dip


@dataclass(frozen=True)
class Finding:
    """A problem of a run, and the step at which it was seen."""

    step: int
    kind: str  # one of KINDS
    text: str


# What there is to find, and what to do about it.
KINDS = {
    "non-finite": "a lower optim.lr.value or an optim.clip",
    "inputs": "the views' mean and std, or what the shards hold",
    "same views": "the views' augmentation, which does nothing",
    "collapse": "the stop-gradient, the centring or the momentum of the method",
    "uniform output": "a lower temperature",
    "too large steps": "a lower optim.lr.value or a longer warm-up",
    "frozen encoder": "what is trained, and optim.lr",
    "no momentum": "method.momentum",
    "spike": "a lower optim.lr.value, a longer warm-up, or backbone.freeze_patch",
    "kNN dip": "the same as for a spike",
    LOST_START: "a lower optim.lr.value, a longer warm-up, optim.layer_decay or start.freeze",
    BELOW: "the views, which may hide what tells the images apart: docs/sick.md; optim.lr; more epochs",
    EQUAL: "optim.epochs, optim.lr and the views: docs/sick.md; with more held-out images chance is less",
    BELOW_START: "a lower optim.lr.value, start.freeze, or start.stop_below",
    FAILED_EVALUATION: "the traceback in train.log; a smaller evaluate.limit or evaluate.size needs less memory",
}


class Health:
    """Reads every record of metrics.jsonl in order, and returns the problems that are new in it."""

    def __init__(self, spikes: Spikes, lr: float = 0.0, frozen: float = 0.0) -> None:
        """`spikes` reads the gradient norms; `lr` is the highest learning rate of the run, and `frozen` the number of
        steps in which the backbone is not to be trained."""
        self.lr, self.frozen, self.spikes = lr, frozen, spikes
        self.rows: dict[str, int] = {}  # measurements in a row at which a condition held
        self.told: set[str] = set()
        self.looks, self.settled = 0, 0  # measurements, and those that count for what must hold several times
        self.curve: list[float] = []  # accuracies of the kNN monitor
        self.low = False  # whether the accuracy is in a dip
        self.spread = False  # projections were not all alike at some measurement

    def gradients(self, first: int, norms: Sequence[Sequence[float]]) -> list[Finding]:
        """Return the spikes in the gradient norms (steps, L layers) of the steps from `first` on. Those
        in which the backbone is not trained do not count: against their norms of zero, all others were spikes."""
        found = [self.spikes.add(step, row) for step, row in enumerate(norms, first) if step > self.frozen]
        return [Finding(s.step, "spike", str(s)) for s in found if s]

    def look(self, record: Mapping[str, Any]) -> list[Finding]:
        """Return the findings of one record. Records without health numbers are checked for skipped steps and the
        kNN curve only."""
        r = {name.removeprefix("health/"): value for name, value in record.items()}
        found = []
        if record.get("skipped_steps") and record.get(LOSS_SCALE, 0) < 1:  # float16 overflows now and then
            found.append(("non-finite", f"{record['skipped_steps']} steps had gradients that are not finite"))
        if "update" in r:
            self.looks += 1
            self.spread |= (r["projector_rank"] > 5 and r["uniformity"] < -0.5) or r.get("usage", 0) > 0.3
            settled = self.looks > GRACE and r["lr"] >= SETTLED * self.lr
            self.settled += settled
            held = {k: text for k, text in conditions(r) if k in AT_ONCE or settled}
            if record["step"] <= self.frozen:
                held.pop("frozen encoder", None)
            self.rows = {kind: self.rows.get(kind, 0) + 1 for kind in held}
            found += [(k, text) for k, text in held.items() if self.rows[k] >= self._enough(k)]
        if MONITOR_KNN in r and (dip := self._dip(r[MONITOR_KNN], r[MONITOR_KNN + "_error"])):
            found.append(("kNN dip", dip))
        new = [(k, t) for k, t in found if k not in self.told or k in REPEATED]
        self.told |= {k for k, _ in new}
        return [Finding(int(record["step"]), kind, text) for kind, text in new]

    def _enough(self, kind: str) -> int:
        """Return for how many measurements in a row a condition must hold to be reported. Collapse takes longer to
        be reported where features have never been spread, as they are at the start of a run."""
        if kind in AT_ONCE:
            return 1
        return LOOKS if kind != "collapse" or self.spread else LATE

    def _dip(self, top1: float, error: float) -> str | None:
        """Return a text when the kNN accuracy falls below the median of the last measurements by more than three
        times their noise, else None. A dip is reported at its first step."""
        before = self.curve[-8:]
        self.curve.append(top1)
        if len(before) < DIP:
            return None
        changes = [abs(b - a) for a, b in itertools.pairwise(before)]
        noise = max(1.5 * median(changes), error, 1.0)
        usual = median(before)
        was, self.low = self.low, usual - top1 > 3 * noise
        if self.low and not was:
            return f"the kNN monitor fell from {usual:.1f} to {top1:.1f} %, its noise is {noise:.1f}"
        return None


AT_ONCE = {"inputs", "same views", "too large steps"}
REPEATED = {"non-finite", "kNN dip"}


def conditions(r: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return the problems that one measurement shows, each as kind and text."""
    found = []
    if abs(r["input_mean"]) > 3 or not 0.05 < r["input_std"] < 5:
        found.append(
            ("inputs", f"pixels have mean {r['input_mean']:.3g} and deviation {r['input_std']:.3g}, not about 0 and 1")
        )
    if r.get("same_views", 0) > 0.95:
        found.append(("same views", f"{100 * r['same_views']:.0f} % of the pixels of views 1 and 2 are equal"))
    if "usage" in r:  # vectors that meet prototypes may lie in a narrow cone; what they choose counts
        if r["usage"] < 0.1:
            found.append(("collapse", f"all images choose the same prototypes (usage {r['usage']:.2g} of 1)"))
    elif r["projector_std"] < 0.1 or r["projector_rank"] < 2 or r["uniformity"] > -0.15:
        rank, even = r["projector_rank"], r["uniformity"]
        found.append(("collapse", f"images are projected to about one vector (rank {rank:.1f}, uniformity {even:.2f})"))
    if r.get("entropy", 0) > 0.995:
        found.append(("uniform output", f"targets are uniform over the prototypes (entropy {r['entropy']:.4f})"))
    if r.get("gain", 1) < 0.1:
        found.append(("uniform output", f"the loss is stuck at ln K, that of a guess (gain {r['gain']:.3f} nats)"))
    if r["update"] > 0.05:
        found.append(("too large steps", f"one step moves the encoder by {100 * r['update']:.0f} % of its weights"))
    if r["growth"] > 2:
        found.append(
            ("too large steps", f"the encoder's weights grew {r['growth']:.1f} times since the last measurement")
        )
    if r["update"] < 1e-9 and r["lr"] > 0:
        found.append(("frozen encoder", "the encoder's weights do not move"))
    if "ema_distance" in r and r["update"] > 0 and r["ema_distance"] < 1.5 * r["update"]:
        found.append(("no momentum", "the momentum encoder is a copy of the encoder it should lag behind"))
    return found


def words(findings: Sequence[Mapping[str, Any]]) -> str:
    """Return the findings of a run on one line."""
    if not findings:
        return "no findings"
    kinds = {f["kind"]: [g["step"] for g in findings if g["kind"] == f["kind"]] for f in findings}
    parts = [
        f"{kind} (step {steps[0]}" + (f", {len(steps)} times)" if len(steps) > 1 else ")")
        for kind, steps in kinds.items()
    ]
    return ", ".join(parts)
