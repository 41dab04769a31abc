"""The device and the process group of a rank, and operations over ranks outside the training loop."""

import warnings
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.distributed as td
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from eagleray.base import cpu_share, devices, dist
from eagleray.base.dist import sharded
from eagleray.base.errors import UserError
from eagleray.models.batch_norm import sync_batch_norms


class World:
    """One training process: alone, or one of several ranks that share a process group."""

    spot = False  # whether the cluster warns before it preempts a machine
    why = ""  # why the previous attempt ended; empty for the first

    def __init__(self, device: torch.device, cpus: float | None = None) -> None:
        """`cpus` is the number of CPUs for this rank; None: those that this process may use."""
        self.device, self.cpus = device, cpus or cpu_share.cpus()
        self.rank, self.size = dist.rank(), dist.size()
        self._control: Any = dist.host_group() if self.size > 1 and devices.is_accelerator(device) else None

    def synchronise(self, module: nn.Module) -> nn.Module:
        """Replace the batch norms of a module, in place, by ones with statistics over all ranks. Returns the module."""
        return sync_batch_norms(module, self.device) if self.size > 1 else module

    def wrap(self, module: nn.Module, reduce: Literal["fp32", "bf16"] = "fp32", *, unused: bool = False) -> nn.Module:
        """Return a module that averages its gradients over ranks, sent in the format `reduce`. With `unused`,
        parameters may have no gradient in a step."""
        if self.size == 1 or sharded(next(module.parameters())):  # FSDP averages gradients itself
            return module
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PyTorch now deprecates an option that older versions need
            # Gradients are views of the buffers that are sent, which saves a copy.
            out = DistributedDataParallel(
                module, broadcast_buffers=False, gradient_as_bucket_view=True, find_unused_parameters=unused
            )
        if reduce == "bf16":
            out.register_comm_hook(None, bf16_compress_hook)
        return out

    def warned(self) -> bool:
        """Return whether this rank was warned that the run has to save, as before a preemption. All ranks call it."""
        return False

    def show(self, record: Mapping[str, Any], steps: int) -> None:
        """Publish a line of metrics.jsonl or health.jsonl to the cluster's monitoring. The run has `steps` steps."""

    def agree(self, *values: float) -> list[float]:
        """Return the sum of each value over all ranks. The sums are on the host, which does not wait for the device."""
        if self.size == 1:
            return list(values)
        x = torch.tensor(values, dtype=torch.float64)
        td.all_reduce(x, group=self._control)
        return x.tolist()  # type: ignore[no-any-return]


def local(gpus: bool | None = None) -> World:
    """Return the world of this process alone, on the device of `device_of`. Raises UserError as `device_of` does."""
    return World(device_of(gpus))


def device_of(gpus: bool | None) -> torch.device:
    """Return this process's accelerator if it has one and `gpus` is not False, otherwise the CPU.

    Raises UserError when `gpus` is True and there is no accelerator."""
    if gpus:
        require_accelerator()
    return devices.CPU if gpus is False else devices.current()


def require_accelerator() -> None:
    """Raises UserError when this process has no accelerator."""
    if not devices.is_accelerator(devices.current()):
        raise UserError(
            "gpus=true: PyTorch finds no accelerator on this machine; leave gpus out or give gpus=false to train on "
            "its CPU, or name a cluster in RAY_ADDRESS, with workers=N"
        )
