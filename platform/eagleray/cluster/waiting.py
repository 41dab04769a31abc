"""Print what a run waits for while the cluster has no room for its workers."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from eagleray.cluster.session import machines

LOOK = 5.0  # seconds between two checks
SOON = 15.0  # seconds in which workers start if there is room
AGAIN = 300.0  # seconds after which the line on what a run waits for is printed again
START = "waiting for "  # beginning of the line on what a run waits for; `eagleray jobs` finds it by this
OTHERS = ", but Ray keeps them for runs that asked before"
Say = Callable[[str], None]


class Waiting:
    """Checks whether the workers of a run have got their resources, and prints a line while they have not."""

    def __init__(
        self,
        ray: Any,
        least: int,
        most: int,
        each: Mapping[str, float],
        say: Say,
        kept: Callable[[], Mapping[str, float] | None] = lambda: None,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        """`each` has the resources of a worker by Ray's names; the run asks for `least` to `most` workers. `kept`
        returns what Ray reserves for the run, or None if unknown. `release` drops the reservations of dead runs."""
        self.kept, self.release = kept, release
        self.ray, self.say, self.each = ray, say, {k: v for k, v in each.items() if v}
        self.least, self.most = least, most
        self.before = set(self._groups())
        self.since = self.looked = time.monotonic()
        self.printed = float("-inf")
        self.line = ""

    def look(self) -> bool:
        """Check whether the run waits. Prints a line on what it waits for, and another when the workers have their
        resources. Returns True if this call has checked, the run waits and the line has been printed."""
        now = time.monotonic()
        if now - self.looked < LOOK:
            return False
        self.looked = now
        if self._placed():
            self.end()
            return False
        line = START + self.wanted() + "; " + self.there()
        if now - self.since >= SOON and (line != self.line or now - self.printed >= AGAIN):
            self.say(line)
            self.line, self.printed = line, now
        if self.line.endswith(OTHERS):
            self.release()
        return bool(self.line)

    def end(self) -> None:
        """Print that the workers have their resources, if a line has said that they wait."""
        if self.line:
            self.say(f"{self.least if self.least == self.most else 'the'} worker(s) have what they asked for")
        self.since, self.line, self.printed = time.monotonic(), "", float("-inf")

    def wanted(self) -> str:
        """Return a text on what the run asks for."""
        number = f"{self.least}" if self.least == self.most else f"{self.least} to {self.most}"
        return f"{number} worker(s) with {amounts(self.each)} each"

    def there(self) -> str:
        """Return a text on what the cluster has, and how much of it is free."""
        nodes = sum(bool(n["Alive"]) for n in self.ray.nodes())
        kinds: list[str] = [k for k in ("CPU", "GPU") if k in self.each]
        known = self.ray.cluster_resources(), self.ray.available_resources()
        total, free = ({k: found.get(k, 0.0) for k in kinds} for found in known)
        line = f"the cluster has {nodes} node(s) with {amounts(total)}, of which {amounts(free)} are free"
        return line + OTHERS * self._kept_away(free)

    def _fits(self) -> bool:
        """Return whether a machine is large enough for a worker."""
        return any(all(node.get(k, 0) >= v for k, v in self.each.items()) for node in machines(self.ray))

    def _kept_away(self, free: Mapping[str, float]) -> bool:
        """Return whether resources for a worker are free on large enough machines, but reserved for other runs."""
        kept, each = self.kept(), self.each.items()
        too_few = kept is not None and any(kept.get(k, 0) < self.least * v for k, v in each)
        return too_few and all(free[k] >= v for k, v in each) and self._fits()

    def _groups(self) -> dict[str, Any]:
        """Return Ray's table of this job's placement groups, whose ids end with the job's. A run's workers are one
        group: Ray starts all or none of them."""
        from ray.util import placement_group_table

        job = self.ray.get_runtime_context().get_job_id()
        return {name: group for name, group in placement_group_table().items() if name.endswith(job)}

    def _placed(self) -> bool:
        """Return whether a group of workers that could be this run's has its resources."""
        return any(
            group["state"] == "CREATED" and self._ours(group)
            for name, group in self._groups().items()
            if name not in self.before
        )

    def asks(self) -> bool:
        """Return whether Ray has a pending placement group that could be this run's. Then the controller must not be
        killed, as the request would outlive it: the workers start later, see that the run is stopped, and end."""
        groups = self._groups().items()
        return any(g["state"] == "PENDING" and self._ours(g) for name, g in groups if name not in self.before)

    def _ours(self, group: Mapping[str, Any]) -> bool:
        bundles = list(group["bundles"].values())
        return self.least <= len(bundles) <= self.most and all(
            {k: v for k, v in b.items() if k in ("CPU", "GPU")} == self.each for b in bundles
        )


@contextmanager
def reserve_workers(ray: Any, number: int, each: Mapping[str, float], say: Say) -> Iterator[Any]:
    """A context with a placement group of `number` workers, close together, that has its resources. A line is printed
    while the cluster has no room for it."""
    from ray.util.placement_group import placement_group, remove_placement_group

    waiting = Waiting(ray, number, number, each, say)
    group = placement_group([dict(each)] * number, strategy="PACK")
    try:
        while not group.wait(timeout_seconds=1):
            waiting.look()
        waiting.end()
        yield group
    finally:
        remove_placement_group(group)


def amounts(resources: Mapping[str, float]) -> str:
    """Return amounts of resources as text, such as `12 CPUs and 1 GPU`."""
    return " and ".join(f"{v:g} {k}{'' if v == 1 else 's'}" for k, v in resources.items())
