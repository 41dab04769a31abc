"""Write the lines of metrics.jsonl to TensorBoard and Weights & Biases, too, where the recipe names them."""

import importlib
import logging
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from eagleray.base.errors import UserError, explained, one_line
from eagleray.runs import layout

log = logging.getLogger(__name__)
# These settings keep W&B from recording the command with its addresses, the source, the output and the machine's load.
QUIET = {"x_disable_meta": True, "disable_git": True, "save_code": False, "console": "off", "x_disable_stats": True}


class Sink(Protocol):
    """A tracker that shows the numbers of a run."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers of a step."""

    def close(self) -> None:
        """Write the numbers that are not written yet."""


class TensorBoard:
    """Event files in the run's folder. Numbers that an earlier start wrote for steps after `step` are hidden."""

    def __init__(self, out: Path, step: int, settings: Mapping[str, Any]) -> None:
        package("tensorboard", "tensorboard")
        tensorboard = package("torch.utils.tensorboard", "tensorboard")
        self.writer = tensorboard.SummaryWriter(str(out / layout.TENSORBOARD), purge_step=step + 1)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WandB:
    """A run of Weights & Biases, offline unless WANDB_MODE says otherwise. `wandb sync` sends it later."""

    def __init__(self, out: Path, step: int, settings: Mapping[str, Any]) -> None:
        wandb = package("wandb", "wandb")
        os.environ.setdefault("WANDB_SILENT", "true")  # a run prints its own lines
        id = out / layout.WANDB_ID
        id.parent.mkdir(exist_ok=True)
        if not id.exists():
            id.write_text(uuid.uuid4().hex[:8])
        self.run = wandb.init(
            project="eagleray",
            name=out.name,
            id=id.read_text(),  # all starts of a run are one run in W&B
            resume="allow",
            dir=str(out),
            mode=os.environ.get("WANDB_MODE", "offline"),
            config=dict(settings),
            settings=wandb.Settings(**QUIET),
        )
        self.run.define_metric("*", step_metric="step")  # W&B's own step count cannot go back after a restart

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self.run.log({"step": step, **numbers})

    def close(self) -> None:
        self.run.finish()


SINKS = {"tensorboard": TensorBoard, "wandb": WandB}


def package(module: str, name: str) -> ModuleType:
    """Import a module of an optional package. Raises UserError where it is not installed."""
    missing = f"track.also: needs the package {name}, which is not installed; `pip install {name}`"
    with explained(missing, ImportError, why=False):
        return importlib.import_module(module)


class Sinks:
    """The sinks that a recipe names. A sink that fails is left out from then on, and the run goes on."""

    def __init__(self, names: Sequence[str], out: Path, step: int, settings: Mapping[str, Any]) -> None:
        """`step` is the step from which the run starts. Raises UserError for a package that is not installed."""
        self.open: dict[str, Sink] = {}
        for name in names:
            self._attempt(name, lambda name=name: self.open.update({name: SINKS[name](out, step, settings)}))

    def log(self, record: Mapping[str, Any]) -> None:
        """Write the numbers of `record`, a line of metrics.jsonl, to all sinks."""
        numbers = {k: float(v) for k, v in record.items() if k != "step" and isinstance(v, int | float)}
        for name, sink in list(self.open.items()):
            self._attempt(name, lambda sink=sink: sink.log(record["step"], numbers))

    def close(self) -> None:
        for name, sink in list(self.open.items()):
            self._attempt(name, sink.close)
        self.open.clear()

    def _attempt(self, name: str, call: Any) -> None:
        try:
            call()
        except UserError:
            raise
        except Exception as e:  # the package, the disk or the network may fail
            self.open.pop(name, None)
            log.warning("track.also: %s gets no more numbers: %s", name, one_line(e))
