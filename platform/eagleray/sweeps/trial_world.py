"""What a trial that trains in its own process, an actor of Ray, learns from the cluster and tells it."""

import contextlib
from collections.abc import Mapping
from typing import Any

from eagleray.cluster.prometheus import Gauges
from eagleray.engine.world import World, device_of
from eagleray.runs.background import Background
from eagleray.runs.recipe import Recipe


class Notice(Background):
    """Asks Ray, beside the steps, whether this machine will be taken away: while Ray's head is away, the answer may
    take minutes. Ray has no public way to ask: its own watcher of runs asks here."""

    seconds = 2.0
    come = False

    def tick(self) -> None:
        import ray
        from ray._private.state import state

        with contextlib.suppress(ray.exceptions.RayError):
            self.come = ray.get_runtime_context().get_node_id() in state.get_draining_nodes()

    def close(self) -> None:
        """Ask no more; an answer is not waited for."""
        self.ended.set()


class TrialWorld(World):
    """The world of such a trial: it saves when its machine is about to be taken away, and exports its numbers."""

    spot = True

    def __init__(self, recipe: Recipe, user: str) -> None:
        super().__init__(device_of(recipe.gpus))
        self.recipe, self.user, self.notice = recipe, user, Notice("notice")
        self.notice.start()
        self.gauges: Gauges | None = None

    def warned(self) -> bool:
        """Return whether Ray has announced that this machine will be taken away, as far as its head has answered."""
        return self.notice.come

    def show(self, record: Mapping[str, Any], steps: int) -> None:
        self.gauges = self.gauges or Gauges(self.recipe.out, self.recipe.method.name, self.user, steps)
        self.gauges.update(record)

    def close(self) -> None:
        """Ask no more, and let Ray drop the numbers, as this process runs other trials after this one."""
        self.notice.close()
        if self.gauges:
            self.gauges.close()
