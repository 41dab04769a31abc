"""Hold the objects that one rank needs to train and evaluate a run."""

import time
from typing import Any, NamedTuple

import torch

from eagleray.base import shards
from eagleray.engine import sharded
from eagleray.engine.precision import Precision
from eagleray.engine.world import World
from eagleray.methods.method import Method
from eagleray.models.backbone import Backbone
from eagleray.runs.anchor import Anchor
from eagleray.runs.build import build_method
from eagleray.runs.monitor import Monitor
from eagleray.runs.plan import Plan
from eagleray.runs.run_dir import RunDir
from eagleray.runs.start_guard import StartGuard
from eagleray.runs.step_log import Clock, OpenLine


class Stateful(NamedTuple):
    """The objects whose state a checkpoint holds. A field's name is the key in the checkpoint."""

    method: Method
    optimizer: torch.optim.Optimizer
    monitor: Monitor
    precision: Precision
    guard: StartGuard
    anchor: Anchor
    line: OpenLine


class RankRun(NamedTuple):
    """The objects that one rank needs to train a run."""

    plan: Plan
    world: World
    folder: RunDir
    stateful: Stateful
    clock: Clock

    @property
    def method(self) -> Method:
        return self.stateful.method

    @property
    def sharded(self) -> bool:
        """Return whether each rank has only a part of the weights."""
        return shards.sharded(next(self.method.parameters()))

    def export(self) -> Backbone:
        """Return the backbone to evaluate and export, whole. Called by all ranks together."""
        if not self.sharded:
            return self.method.export()
        backbone = build_method(self.plan.recipe).export()
        backbone.load_state_dict(sharded.whole_state(self.method.export()))
        return backbone.to(self.world.device)


def clock_of(state: dict[str, Any]) -> Clock:
    """Return a clock that goes on from the times in a checkpoint."""
    return Clock(time.monotonic() - state["seconds"], state["useful"])
