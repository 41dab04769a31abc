"""Ranks on simulated devices: their collectives take tensors of the device alone, as NCCL takes those of GPUs alone.

with simulated_group(rank, size, port), simulated() as waits:
    pretrain(recipe, World(DEVICE), tracking=...)
"""

import collections
import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as td
from helpers import simulated_device
from helpers.simulated_device import DEVICE, OnDevice
from torch import Tensor

BACKEND = "simulated"
GLOO: dict[str, td.ProcessGroup] = {}  # by name of a group of the device: the same ranks, for the wrapped tensors
LATEST: collections.deque[td.Work] = collections.deque(maxlen=100)  # C++ holds no reference to what is of Python


@contextlib.contextmanager
def simulated_group(rank: int, size: int, port: int) -> Iterator[None]:
    """Make this process a rank of a group of simulated devices."""
    if not hasattr(td.Backend, BACKEND.upper()):
        td.Backend.register_backend(BACKEND, _create, devices=[DEVICE.type])
    td.init_process_group(BACKEND, f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    group = td.group.WORLD
    assert group is not None
    GLOO[group.group_name] = td.new_group(backend="gloo")
    simulated_device.ELSEWHERE["c10d"] = _collective
    try:
        yield
    finally:
        del simulated_device.ELSEWHERE["c10d"]
        GLOO.clear()
        td.destroy_process_group()


def _create(store: td.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Return the backend of a group. It is gloo, which PyTorch knows as a backend of the device alone."""
    return td.ProcessGroupGloo(store, rank, size, timeout)


def _collective(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a collective of tensors of the device on the tensors that they wrap, in the gloo group of the same ranks.

    A collective of tensors of the CPU runs as it is, and PyTorch refuses it unless its group is one of gloo."""
    tensors = [x for x in simulated_device.leaves((args, kwargs)) if isinstance(x, Tensor)]
    here = [isinstance(x, OnDevice) for x in tensors]
    if not any(here):
        return func(*args, **kwargs)
    if not all(here):
        raise RuntimeError(f"{func}: expected all tensors on one device, found {DEVICE} and cpu")

    flat = "allgather_base" in func._schema.name  # NCCL takes any shape, and gloo divides the first dimension

    def inner(x: Any) -> Any:
        if flat and isinstance(x, OnDevice):
            return x.inner.view(-1)
        if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type()):
            name = td.ProcessGroup.unbox(x).group_name
            if name not in GLOO:
                raise RuntimeError(f"{func}: expected tensors of the CPU, which gloo takes, found some on {DEVICE}")
            return GLOO[name].boxed()
        return simulated_device.inner(x)

    known = {id(x.inner): x for x in tensors}

    def outer(x: Any) -> Any:
        return _Done(td.Work.unbox(x), tensors).boxed() if isinstance(x, torch.ScriptObject) else known.get(id(x), x)

    return simulated_device.map_leaves(
        outer, func(*simulated_device.map_leaves(inner, args), **simulated_device.map_leaves(inner, kwargs))
    )


class _Done(td.Work):
    """A collective that has ended, whose result are tensors of the device. Gloo's are those that they wrap, which
    DistributedDataParallel would copy."""

    def __init__(self, work: td.Work, tensors: list[Tensor]) -> None:
        super().__init__()
        work.wait()
        self.tensors = tensors
        LATEST.append(self)

    def wait(self, *_: Any) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        out: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        out.set_result(self.tensors)
        return out
