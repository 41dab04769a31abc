"""Decide how many trials run at a time, and what resources each of them asks Ray for."""

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

MEMORY = 2**20  # bytes that a trial with workers asks for, as Ray requires some; its workers ask for GPUs and CPUs
LOOK = 2.0  # seconds between two checks whether a trial has room
QUIET = 30.0  # seconds without a trial that has its resources, after which a line says what trials wait for


def share(sweep: Sweep, nodes: Sequence[Mapping[str, float]], *, joined: bool) -> dict[str, float]:
    """Return the resources that one trial asks Ray for. `joined` says that Ray is a cluster, where trials may wait for
    new machines. Raises UserError when no machine can have room for a trial, or `gpus` and `workers` conflict."""
    wanted = first_recipes(sweep)
    workers = max(r.ranks[1] for r in wanted)
    if workers > 1:
        if sweep.gpus:
            raise UserError(
                f"sweep.gpus={sweep.gpus:g}: each of a trial's workers={workers} takes a whole GPU; expected workers=1"
            )
        for r in wanted:
            ray_train.resources(r, nodes)  # raises UserError if GPUs are missing
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
    """Return a recipe of each alternative, with the first value of each key that varies."""
    firsts = {n: {k: v.options[0] for k, v in b.space.items()} for n, b in sweep.alternatives.items()}
    return [recipe_of(sweep, n, values, n) for n, values in firsts.items()]


def room(node: Mapping[str, float], each: Mapping[str, float]) -> int:
    """Return how many trials fit on a machine. A trial never takes parts of two GPUs."""
    fits = node.get("CPU", 0) // each["CPU"]
    if each["GPU"]:
        fits = min(fits, int(node.get("GPU", 0)) * ((1 + 1e-6) // each["GPU"]))
    return int(fits)


class Width:
    """Computes how many trials may run at a time, which changes as machines join and leave."""

    def __init__(self, sweep: Sweep, most: int | None, nodes: Callable[[], Sequence[Mapping[str, float]]]) -> None:
        """`most` is the user's limit or None, and `nodes` returns the resources of each machine that is up."""
        self.most, self.nodes = most or sys.maxsize, nodes
        wanted = first_recipes(sweep)
        self.workers = max(r.ranks[1] for r in wanted)
        self.waits = any(r.gpus for r in wanted)  # whether trials may wait for machines with GPUs that are not up yet

    def now(self) -> int:
        """Return how many trials may run now. With one worker each, it is the user's limit, as Ray lets trials wait.

        With several workers each, it is as many as the GPUs can hold, but at least one. With gpus=true, it is the
        user's limit or, without one, a trial more than the GPUs can hold, so that an autoscaler adds machines."""
        if self.workers <= 1 or (self.waits and self.most < sys.maxsize):
            return self.most
        fit = int(sum(n.get("GPU", 0) for n in self.nodes())) // self.workers
        return min(fit + 1 if self.waits else max(fit, 1), self.most)


class TrialWaiting:
    """Prints once what the trials wait for, if none has got its resources within QUIET seconds. A trial with several
    workers has its resources when its workers have theirs."""

    def __init__(
        self,
        study: Study,
        each: Mapping[str, float],
        nodes: Callable[[], Sequence[Mapping[str, float]]],
        show: Callable[[], None],
    ) -> None:
        """`each` has the resources of a trial by Ray's names. `show` is called whenever this object is called."""
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
        """Return whether a started trial has its resources; also True when the store with its files does not answer."""
        if self.largest.ranks[1] <= 1:
            return True
        try:
            return run_store(self.study.trial(trial)).get(layout.PLACEMENT) is not None
        except Outage:
            return True

    def wanted(self) -> str:
        """Return a text on what a trial needs."""
        least, most = self.largest.ranks
        if most > 1:
            gpus = self.largest.gpus or (self.largest.gpus is None and any(n.get("GPU") for n in self.nodes()))
            return f"room for a trial, {least} worker(s) with a {'GPU' if gpus else 'share of the CPUs'} each"
        part = f", {self.each['GPU']:g} GPU" if self.each.get("GPU") else ""
        return f"a machine with room for a trial, {self.each['CPU']:g} CPU{part}"
