"""Connects a trial that trains in a Ray actor's process to Ray, which warns of preemption and exports metrics."""

import contextlib
from collections.abc import Mapping
from typing import Any

from eagleray.cluster.prometheus import Gauges
from eagleray.engine.world import World, device_of
from eagleray.runs.background import Background
from eagleray.runs.recipe import Recipe


class Notice(Background):
    """A thread that asks Ray whether this machine will be preempted, as the answer may take minutes while Ray's head is
    unavailable. Ray has no public function for this; Ray Train uses the same private one for its own runs."""

    seconds = 2.0
    come = False

    def tick(self) -> None:
        import ray
        from ray._private.state import state

        with contextlib.suppress(ray.exceptions.RayError):
            self.come = ray.get_runtime_context().get_node_id() in state.get_draining_nodes()

    def close(self) -> None:
        """Stop asking, without waiting for an answer."""
        self.ended.set()


class TrialWorld(World):
    """A trial's training process, a Ray actor. It saves before its machine is preempted, and exports its metrics."""

    spot = True

    def __init__(self, recipe: Recipe, user: str) -> None:
        super().__init__(device_of(recipe.gpus))
        self.recipe, self.user, self.notice = recipe, user, Notice("notice")
        self.notice.start()
        self.gauges: Gauges | None = None

    def warned(self) -> bool:
        """Return whether Ray's head has answered that this machine will be preempted."""
        return self.notice.come

    def show(self, record: Mapping[str, Any], steps: int) -> None:
        self.gauges = self.gauges or Gauges(self.recipe.out, self.recipe.method.name, self.user, steps)
        self.gauges.update(record)

    def close(self) -> None:
        """Stop asking about preemption, and close the gauges, as this process runs other trials after this one."""
        self.notice.close()
        if self.gauges:
            self.gauges.close()
