"""Detect from a run's metrics what goes wrong: collapse, uniform output, instability, frozen weights, wrong images.

Spikes of the gradient norm, and the layers in which they begin, follow figure 4 of Chen, Xie and He 2021,
arXiv:2104.02057. docs/health.md gives the reason for each threshold."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eagleray.runs.metrics import LOSS_SCALE, MONITOR_KNN, START_CKA

LOOKS = 3  # measurements in a row for which most conditions must hold to be reported, as they may be temporary
LATE = 6  # measurements in a row after which a collapse is reported if features were never spread out before
SETTLED = 0.2  # share of the highest learning rate below which most conditions are ignored, as little is learnt
GRACE = 2  # number of first measurements that most checks skip, as features may still be those of random weights
HISTORY = 100  # number of steps whose median is the usual gradient norm of a layer
WARM = 30  # number of first steps, in which no spike is reported
FACTOR = 20.0  # a spike exceeds this multiple of the median norm
SIGMAS = 8.0  # a spike also exceeds the median of the log norms by this many robust deviations
TINY = 1e-30  # lower limit of norms, as zero has no logarithm
SPREAD = 50  # most steps that a spike lasts, in which it may spread to other layers

FAILED_EVALUATION = "failed evaluation"
LOST_START = "start lost"
BELOW, EQUAL = "below untrained", "not above untrained"
BELOW_START = "below the start"
AT_END = (BELOW, EQUAL, BELOW_START)  # findings of the evaluation at the end
DIP = 5  # number of earlier measurements of the kNN monitor that it takes to see a dip


@dataclass(frozen=True)
class Finding:
    """A problem of a run, and the step at which it was seen."""

    step: int
    kind: str  # one of KINDS
    text: str


# Maps each kind of finding to what may help.
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
    BELOW: "the views, which may hide what tells the images apart; optim.lr; more epochs",
    EQUAL: "optim.epochs, optim.lr and the views; with more held-out images chance is less",
    BELOW_START: "a lower optim.lr.value, start.freeze, or start.stop_below",
    FAILED_EVALUATION: "the traceback in train.log; a smaller evaluate.limit or evaluate.size needs less memory",
}


AT_ONCE = {"inputs", "same views", "too large steps"}  # kinds that are reported after a single measurement
REPEATED = {"non-finite", "kNN dip"}  # kinds that may be reported more than once


@dataclass(frozen=True)
class Spike:
    """A stretch of steps with gradient norms far above their median."""

    step: int  # the first step of the spike
    layers: tuple[tuple[str, int, float], ...]  # a layer's name, its delay in steps, its largest multiple of the median
    lasted: int | None  # steps until all layers were below twice their medians; None: not in SPREAD steps

    @property
    def first(self) -> str:
        """Return the layer in which the spike began."""
        return self.layers[0][0]

    def __str__(self) -> str:
        worst = max(factor for _, _, factor in self.layers)
        text = f"gradients {worst:.0f} times their median, first in {self.first}"
        later = [f"{name} {after} steps later" for name, after, _ in self.layers if after][-1:]
        text += f", {later[0]}" if later else ", in all layers at once" if len(self.layers) > 1 else ""
        return text + (
            f"; over after {self.lasted} steps" if self.lasted is not None else f"; not over in {SPREAD} steps"
        )


class Spikes:
    """Reads the gradient norms of every step, and returns each spike once it is over or has lasted SPREAD steps."""

    def __init__(self, layers: Sequence[str]) -> None:
        self.layers = list(layers)
        self.usual = np.zeros((0, len(layers)))  # (n, L) norms of the last HISTORY steps without a spike
        self.hit: dict[int, tuple[int, float]] = {}  # by index of a layer in a spike: its first step and largest factor

    def state_dict(self) -> dict[str, Any]:
        hit = [[layer, *reached] for layer, reached in self.hit.items()]
        return {"usual": self.usual.tolist(), "hit": hit}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.usual = np.array(state["usual"], np.float64).reshape(-1, len(self.layers))
        self.hit = {int(layer): (int(step), float(largest)) for layer, step, largest in state["hit"]}

    def add(self, step: int, norms: Sequence[float]) -> Spike | None:
        """Add the norms (L layers,) of one step, and return the spike that ends with it, if any.
        Norms that are not finite are left out, as they belong to a skipped step."""
        now = np.asarray(norms)
        if not np.isfinite(now).all():
            return None
        if len(self.usual) < WARM:
            self.usual = np.vstack([self.usual, now])
            return None
        middle = np.maximum(np.median(self.usual, 0), TINY)
        factor = now / middle
        for i in np.flatnonzero(factor > threshold(self.usual, middle)).tolist():
            at, largest = self.hit.get(i, (step, 0.0))
            self.hit[i] = at, max(largest, float(factor[i]))
        calm = bool((factor < 2).all())
        if not self.hit:
            self.usual = np.vstack([self.usual, now])[-HISTORY:]  # norms of a spike are not added
            return None
        began = min(at for at, _ in self.hit.values())
        return self._over(step - began, calm=calm) if calm or step - began >= SPREAD else None

    def _over(self, lasted: int, *, calm: bool) -> Spike:
        order = sorted(self.hit.items(), key=lambda item: item[1][0])
        began = order[0][1][0]
        found = tuple((self.layers[i], at - began, factor) for i, (at, factor) in order)
        self.hit = {}
        if not calm:
            self.usual = self.usual[:0]  # norms that stay high become the usual ones
        return Spike(began, found, lasted if calm else None)


def threshold(usual: NDArray[np.float64], middle: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the multiple (L,) of each layer's median norm above which a norm is a spike: SIGMAS robust deviations of
    the logs of past norms, and at least FACTOR. `usual` (n, L) are past norms, and `middle` (L,) their medians."""
    noise = 1.4826 * np.median(np.abs(np.log(np.maximum(usual, TINY) / middle)), 0)
    return np.maximum(FACTOR, np.exp(np.minimum(SIGMAS * noise, 50.0)))


class Health:
    """Reads every record of metrics.jsonl in order, and returns the problems that are new in it."""

    def __init__(self, spikes: Spikes, lr: float = 0.0, frozen: float = 0.0) -> None:
        """`spikes` reads the gradient norms; `lr` is the highest learning rate of the run, and `frozen` the number of
        first steps in which the backbone is frozen."""
        self.lr, self.frozen, self.spikes = lr, frozen, spikes
        self.rows: dict[str, int] = {}  # number of latest measurements in a row at which a condition held, by kind
        self.told: set[str] = set()
        self.looks, self.settled = 0, 0  # number of measurements, and of those at which most conditions are checked
        self.curve: list[float] = []  # accuracies of the kNN monitor
        self.low = False  # whether the accuracy is in a dip
        self.spread = False  # whether images had different projections at any measurement so far

    def gradients(self, first: int, norms: Sequence[Sequence[float]]) -> list[Finding]:
        """Return the spikes in the gradient norms (steps, L layers) of the steps from `first` on. Steps in which the
        backbone is frozen are left out: their norms are zero, so compared with them all later norms would be spikes."""
        found = [self.spikes.add(step, row) for step, row in enumerate(norms, first) if step > self.frozen]
        return [Finding(s.step, "spike", str(s)) for s in found if s]

    def look(self, record: Mapping[str, Any]) -> list[Finding]:
        """Return the findings of one record. Records without health numbers are checked for skipped steps and the
        kNN curve only."""
        r = {name.removeprefix("health/"): value for name, value in record.items()}
        found = []
        if record.get("skipped_steps") and record.get(LOSS_SCALE, 0) < 1:  # a scale above 1 may overflow float16
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
        """Return for how many measurements in a row a condition must hold to be reported. For a collapse they are more
        if features were never spread out so far, as the features of random weights are not spread out either."""
        if kind in AT_ONCE:
            return 1
        return LOOKS if kind != "collapse" or self.spread else LATE

    def _dip(self, top1: float, error: float) -> str | None:
        """Return a text when the kNN accuracy `top1` falls below the median of the last measurements by more than three
        times their noise, else None. `error` is its standard error. A dip is only reported where it begins."""
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


def conditions(r: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return the problems that the numbers `r` of one measurement show, each as kind and text."""
    found = []
    if abs(r["input_mean"]) > 3 or not 0.05 < r["input_std"] < 5:
        found.append(
            ("inputs", f"pixels have mean {r['input_mean']:.3g} and deviation {r['input_std']:.3g}, not about 0 and 1")
        )
    if r.get("same_views", 0) > 0.95:
        found.append(("same views", f"{100 * r['same_views']:.0f} % of the pixels of views 1 and 2 are equal"))
    if "usage" in r:  # features with prototypes may lie in a narrow cone, so only the prototypes they choose count
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
    """Return the findings of a run as text on one line."""
    if not findings:
        return "no findings"
    kinds = {f["kind"]: [g["step"] for g in findings if g["kind"] == f["kind"]] for f in findings}
    parts = [
        f"{kind} (step {steps[0]}" + (f", {len(steps)} times)" if len(steps) > 1 else ")")
        for kind, steps in kinds.items()
    ]
    return ", ".join(parts)


class Checked(NamedTuple):
    """Texts on the kinds of findings: which a run was checked for and how often, and which it was not and why."""

    done: list[str]
    missing: list[str]


def checked(
    records: Sequence[Mapping[str, Any]],
    *,
    lr: float,
    frozen: float = 0.0,
    first: int = 0,
    labelled: bool = True,
    started: bool = False,
) -> Checked:
    """Return which findings the lines of metrics.jsonl can show. `lr` and `frozen` are as for `Health`, `first` is the
    step that the run began with, and `started` tells whether a guard compares its features with those at the start."""
    health = Health(Spikes([]), lr, frozen)
    for record in records:
        health.look(record)
    keys = {key for record in records for key in record}
    steps = int(records[-1]["step"]) if records else 0
    out = Checked([], [])

    def note(names: Sequence[str], times: int, least: int, what: str) -> None:
        words = ", ".join(names)
        if times >= least:
            out.done.append(f"{words} ({times:,} {what}{'s' * (times != 1)})")
        else:
            out.missing.append(f"{words} ({times} of the {least} {what}{'s' * (least != 1)} that it takes)")

    note(["inputs", *["same views"] * ("health/same_views" in keys), "too large steps"], health.looks, 1, "measurement")
    note(["non-finite"], steps, 1, "step")
    note(["spike"], max(steps - first - WARM, 0), 1, "step")
    in_a_row = ["uniform output"] * bool(keys & {"entropy", "gain"}) + ["frozen encoder"]
    in_a_row += ["no momentum"] * ("health/ema_distance" in keys)
    late = LOOKS if health.spread or not health.looks else LATE
    groups = [(["collapse", *in_a_row], LOOKS)] if late == LOOKS else [(["collapse"], LATE), (in_a_row, LOOKS)]
    for names, least in groups:
        note(names, health.settled, least, "measurement")
    if labelled:
        looks = sum(MONITOR_KNN in record for record in records)
        note(["kNN dip"], looks, DIP + 1, "measurement")
    else:
        out.missing.append("kNN dip (no labels)")
    if started:
        note(["start lost"], sum(START_CKA in record for record in records), 1, "measurement")
    return out
