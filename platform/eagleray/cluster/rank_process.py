"""Train one rank in a forked process, which serves one attempt to train the run.

This module must not import Ray, whose threads would not survive the fork. Instead the process sends to its worker what
Ray has to know, such as metrics."""

import contextlib
import importlib
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as td

from eagleray import config
from eagleray.base import dist
from eagleray.base.devices import is_accelerator
from eagleray.base.errors import Futile, Outage, Preempted, Superseded, UserError, one_line
from eagleray.cluster.failure import report
from eagleray.cluster.spares import WorkerLine
from eagleray.cluster.supervisor import DONE, FAIL, FAILED, GO, PREEMPTED, SHOW, SUPERSEDED, WARNED
from eagleray.config import plugins
from eagleray.engine.world import World
from eagleray.runs import pretrain
from eagleray.runs.recipe import Recipe

for _name in ("boto3", "mlflow"):  # imported here so that no forked process spends time on it; either may be missing
    with contextlib.suppress(ImportError):
        importlib.import_module(_name)


class RayWorld(World):
    """A training process on Ray: its worker warns it before a machine is preempted, and exports its metrics."""

    spot = True

    def __init__(self, device: torch.device, cpus: float, line: WorkerLine, why: str) -> None:
        super().__init__(device, cpus)
        self.line, self.why = line, why

    def warned(self) -> bool:
        """Return whether the run has to save before a machine is preempted or the number of workers changes."""
        return self.line.told(WARNED)

    def show(self, record: Mapping[str, Any], steps: int) -> None:
        """Send a record of rank 0's metrics to the worker, which exports them."""
        self.line.send(SHOW, dict(record), steps)


def train(line: WorkerLine, attempt: int, why: str, given: Mapping[str, Any]) -> None:
    """Train one rank, and tell the worker the result or the error. `why` says what ended the previous attempt."""
    last: tuple[Any, ...]
    try:
        last = DONE, _train(line, attempt, why, given)
    except Preempted as e:
        last = PREEMPTED, str(e)
    except Superseded as e:  # this rank had hung, and the run went on without it
        last = SUPERSEDED, str(e)
    except (UserError, Outage) as e:
        line.send(FAIL, {"user": isinstance(e, UserError), "outage": isinstance(e, Outage), "why": str(e)})
        last = FAILED, one_line(e)
    except Exception as e:
        failure = report(e)
        if isinstance(e, Futile):
            line.send(FAIL, failure | {"why": one_line(e)})
        last = FAILED, f"rank {os.environ['RANK']}: {failure['why']}", failure
    line.send(*last)
    line.wait_for(GO)  # the end of this process closes connections that other ranks may still need


def _train(line: WorkerLine, attempt: int, why: str, given: Mapping[str, Any]) -> dict[str, Any] | None:
    plugins.install(given["plugins"])
    recipe = config.check(Recipe, given["recipe"], "recipe")
    device = torch.device(given["device"])
    if is_accelerator(device):
        torch.accelerator.set_device_index(device)
    else:
        torch.set_num_threads(max(int(given["cpus"]), 1))
    form_group(device, attempt, given["timeout"])
    world = RayWorld(device, given["cpus"], line, why)
    return pretrain.pretrain(recipe, world, tracking=given["tracking"], command=given["command"])


def form_group(device: torch.device, attempt: int, timeout: float) -> None:
    """Form the process group of an attempt, through the store at the address in the environment, as torchrun's agent
    does. `timeout` is in seconds."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
    limit = timedelta(seconds=timeout)
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = td.PrefixStore(f"{attempt}/group", td.TCPStore(*address, is_master=False, timeout=limit))
    where = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    dist.form_group(device, limit, store=store, **where)
