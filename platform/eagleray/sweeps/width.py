"""Decide how many trials run at once, and what each asks Ray for."""

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from eagleray.base.errors import Outage, UserError
from eagleray.cluster import ray_train
from eagleray.runs import layout
from eagleray.runs.recipe import Recipe
from eagleray.runs.run_store import run_store
from eagleray.sweeps.study import Study
from eagleray.sweeps.sweep import Sweep, recipe_of

MEMORY = 2**20  # bytes: what a trial asks for whose workers ask for the rest, as Ray wants it to ask for something
LOOK = 2.0  # seconds between two looks whether a trial has room
QUIET = 30.0  # seconds without a running trial after which it is said what trials wait for


def share(sweep: Sweep, nodes: Sequence[Mapping[str, float]], *, joined: bool) -> dict[str, float]:
    """Return the resources that one trial asks Ray for. Trials wait for machines that join the cluster, if there is
    one (`joined`). Raises UserError when no machine can have room for a trial."""
    wanted = first_recipes(sweep)
    workers = max(r.ranks[1] for r in wanted)
    if workers > 1:
        if sweep.gpus:
            raise UserError(
                f"sweep.gpus={sweep.gpus:g}: each of a trial's workers={workers} takes a whole GPU; expected workers=1"
            )
        for r in wanted:
            ray_train.resources(r, nodes)  # says what is missing
        return {"CPU": 0, "memory": MEMORY}
    asked = any(r.gpus for r in wanted)
    if sweep.gpus and any(r.gpus is False for r in wanted):
        raise UserError(
            f"sweep.gpus={sweep.gpus:g}: the recipe's gpus=false keeps trials on CPUs; leave one of them out"
        )
    gpu = bool(sweep.gpus) or asked or (all(r.gpus is None for r in wanted) and any(n.get("GPU") for n in nodes))
    each = {"CPU": sweep.cpus, "GPU": sweep.gpus or float(gpu)}
    if any(room(n, each) for n in nodes):
        return each
    if not joined:
        cpus = f"{sweep.cpus} CPU{'s' * (sweep.cpus > 1)}"
        kind = f" and {each['GPU']:g} of a GPU" if sweep.gpus else " and a GPU" if gpu else ""
        raise UserError(f"sweep.cpus={sweep.cpus}: a trial needs {cpus}{kind}, which this machine has not")
    if not (gpu or any(r.gpus is False for r in wanted) or any(n.get("CPU") for n in nodes)):
        raise UserError("gpus: no machine for trials is up yet: expected gpus=true or gpus=false, as it cannot be seen")
    return each


def first_recipes(sweep: Sweep) -> list[Recipe]:
    """Return a recipe of each alternative."""
    firsts = {n: {k: v.options[0] for k, v in b.space.items()} for n, b in sweep.alternatives.items()}
    return [recipe_of(sweep, n, values, n) for n, values in firsts.items()]


def room(node: Mapping[str, float], each: Mapping[str, float]) -> int:
    """Return how many trials fit on a machine. No trial takes parts of two GPUs."""
    fits = node.get("CPU", 0) // each["CPU"]
    if each["GPU"]:
        fits = min(fits, int(node.get("GPU", 0)) * ((1 + 1e-6) // each["GPU"]))
    return int(fits)


class Width:
    """Counts how many trials may run at once, which changes as machines join and leave."""

    def __init__(self, sweep: Sweep, most: int | None, nodes: Callable[[], Sequence[Mapping[str, float]]]) -> None:
        """`most` is the user's maximum."""
        self.most, self.nodes = most or sys.maxsize, nodes
        wanted = first_recipes(sweep)
        self.workers = max(r.ranks[1] for r in wanted)
        self.waits = any(r.gpus for r in wanted)  # waits for GPUs that are not up yet

    def now(self) -> int:
        """Return the number. Ray lets trials of one process wait until they fit. Trials with workers are counted
        here: by the GPUs that are up, or one at a time on CPUs. Trials that wait for GPUs are as many as the user says,
        by default one, which is what an autoscaler sees."""
        if self.workers <= 1 or (self.waits and self.most < sys.maxsize):
            return self.most
        fit = int(sum(n.get("GPU", 0) for n in self.nodes())) // self.workers
        return min(fit + 1 if self.waits else max(fit, 1), self.most)


class TrialWaiting:
    """Says once what the trials wait for, when none of them has had room for a while. A trial with several workers has
    room when these have their resources."""

    def __init__(
        self,
        study: Study,
        each: Mapping[str, float],
        nodes: Callable[[], Sequence[Mapping[str, float]]],
        show: Callable[[], None],
    ) -> None:
        """`show` is called each time."""
        self.study, self.each, self.nodes, self.show = study, each, nodes, show
        self.since = self.looked = time.monotonic()
        self.largest = max(first_recipes(study.sweep), key=lambda r: r.ranks[1])

    def __call__(self) -> None:
        self.show()
        now = time.monotonic()
        if self.since == math.inf or now - self.looked < LOOK:
            return
        self.looked = now
        if any(r["state"] == "running" and self.placed(r["id"]) for r in list(self.study.rows.values())):
            self.since = math.inf
        elif now > self.since + QUIET:
            self.since = math.inf
            up = [f"{n.get('CPU', 0):g} CPU, {n.get('GPU', 0):g} GPU" for n in self.nodes()]
            self.study.note(f"waiting for {self.wanted()}; the machines that are up have {'; '.join(up[:8])}")

    def placed(self, trial: str) -> bool:
        """Return whether a trial that Tune has started has room; yes, while the store does not answer."""
        if self.largest.ranks[1] <= 1:
            return True
        try:
            return run_store(self.study.trial(trial)).get(layout.PLACEMENT) is not None
        except Outage:
            return True

    def wanted(self) -> str:
        """Return in words what a trial needs."""
        least, most = self.largest.ranks
        if most > 1:
            gpus = self.largest.gpus or (self.largest.gpus is None and any(n.get("GPU") for n in self.nodes()))
            return f"room for a trial, {least} worker(s) with a {'GPU' if gpus else 'share of the CPUs'} each"
        part = f", {self.each['GPU']:g} GPU" if self.each.get("GPU") else ""
        return f"a machine with room for a trial, {self.each['CPU']:g} CPU{part}"
