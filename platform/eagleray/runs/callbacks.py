"""Let a plug-in follow a run: its callbacks see every step, record and score, but cannot change the samples' order."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from eagleray.base.errors import PluginError
from eagleray.config import plugins, register
from eagleray.engine.loop import Step
from eagleray.methods.method import Method
from eagleray.runs.contract import foreign_code
from eagleray.runs.recipe import Recipe


@dataclass(frozen=True)
class RunView:
    """The part of a run that its callbacks can read."""

    recipe: Recipe
    method: Method
    out: str  # folder of the run, a path or an s3://, gs:// or az:// URL
    rank: int
    ranks: int
    device: torch.device
    steps: int  # number of planned steps


class Callback:
    """Base class of callbacks: override its methods. All ranks call their callbacks in the same order."""

    def start(self, run: RunView, step: int) -> None:
        """Called when the run starts, or continues after `step` steps."""

    def step(self, run: RunView, step: Step) -> None:
        """Called after each optimiser step. Reading a value of `step.values` makes the host wait for the device."""

    def log(self, run: RunView, record: Mapping[str, Any]) -> None:
        """Called when a line of metrics.jsonl is written."""

    def evaluation(self, run: RunView, scores: Mapping[str, float]) -> None:
        """Called after an evaluation of the backbone, during training or at the end of the run."""

    def checkpoint(self, run: RunView, step: int) -> None:
        """Called while the checkpoint after `step` steps is being saved in the background."""

    def end(self, run: RunView, summary: Mapping[str, Any]) -> None:
        """Called after all planned steps, when the backbone has been evaluated and exported."""


class Callbacks:
    """The callbacks that the plug-ins of a recipe have registered, called in the order of their registration."""

    def __init__(self, run: RunView) -> None:
        self.run = run
        entries = [e for e in register.entries("callback").values() if plugins.owner(e.module) in run.recipe.plugins]
        self.callbacks: Sequence[tuple[str, Callback]] = [(e.name, self._make(e.name, e.target)) for e in entries]

    def _make(self, name: str, target: Any) -> Callback:
        """Create the callback of the class `target`. Raises PluginError if it is no Callback, or its code fails."""
        if not (isinstance(target, type) and issubclass(target, Callback)):
            raise PluginError(f"callback {name}: expected a subclass of eagleray.Callback")
        with foreign_code(f"callback {name}: creating it failed"):
            return target()

    def __call__(self, event: str, argument: Any) -> None:
        """Call the method `event` of every callback with `argument`. Raises PluginError when a callback fails."""
        for name, callback in self.callbacks:
            with foreign_code(f"callback {name}: {event} failed"):
                getattr(callback, event)(self.run, argument)
