"""Where a rank runs: its number, its device, and how ranks agree. The loop never knows which world it is in."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as td
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from eagleray import dist
from eagleray.models.norm import synchronised


class World:
    """This process alone, or one of several that share a process group."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rank, self.size = dist.rank(), dist.size()
        self._control: Any = td.new_group(backend="gloo") if self.size > 1 and device.type == "cuda" else None

    def synchronise(self, module: nn.Module) -> nn.Module:
        """Batch norms over all ranks."""
        return synchronised(module, self.device) if self.size > 1 else module

    def wrap(self, module: nn.Module) -> nn.Module:
        """Average gradients over ranks."""
        if self.size == 1:
            return module
        ids = [self.device.index] if self.device.type == "cuda" else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the option has a new name that older versions lack
            return DistributedDataParallel(module, device_ids=ids, broadcast_buffers=False)

    def agree(self, *values: float) -> list[float]:
        """Sums over ranks of a few numbers on the host; the device is not waited for."""
        if self.size == 1:
            return list(values)
        x = torch.tensor(values, dtype=torch.float64)
        td.all_reduce(x, group=self._control)
        return x.tolist()  # type: ignore[no-any-return]


@contextmanager
def local() -> Iterator[World]:
    """This process, or, under torchrun, this rank."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    several = int(os.environ.get("WORLD_SIZE", 1)) > 1
    if several:
        td.init_process_group("nccl" if cuda else "gloo")
    try:
        yield World(device)
    finally:
        if several:
            td.destroy_process_group()
