"""The accelerator of this process, whichever maker it is from: NVIDIA, AMD, Intel, Apple or another that PyTorch knows.

The rest of the code asks these functions, and uses `torch.Stream`, `torch.Event` and `torch.accelerator`, instead of
`torch.cuda`. Code that runs on CUDA alone says so where it asks.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

import torch

from eagleray.base.contexts import replaced

CPU = torch.device("cpu")
T = TypeVar("T")
WIDE_SUMS = {"cuda"}  # devices, of NVIDIA and AMD, that multiply 16-bit matrices into float32 ones in one operation
_pretending = False


def is_accelerator(device: torch.device) -> bool:
    """Return whether the host only queues work for a device, instead of computing itself."""
    return _kind(device) not in ("cpu", "meta")


def has_wide_sums(device: torch.device) -> bool:
    """Return whether `torch.mm` and `torch.addmm` have an `out_dtype` on a device."""
    return _kind(device) in WIDE_SUMS


def pretending() -> AbstractContextManager[None]:
    """A context in which the CPU is taken for an accelerator by all code that asks, for traces of tensors that have no
    values: PyTorch gives no other device to such tensors on a machine that lacks it."""
    return replaced(sys.modules[__name__], "_pretending", True)  # a process traces one step at a time


def _kind(device: torch.device) -> str:
    return "cuda" if _pretending and device.type == "cpu" else device.type


def has_streams(device: torch.device) -> bool:
    """Return whether a device copies from pinned memory while it computes. Apple's has one stream and the host's
    memory."""
    return is_accelerator(device) and device.type != "mps"


def has_float64(device: torch.device) -> bool:
    """Return whether a device computes in float64, which Apple's and some of Intel's do not."""
    return device.type != "mps" and (device.type != "xpu" or bool(torch.xpu.get_device_properties(device).has_fp64))


def current() -> torch.device:
    """Return the accelerator that this process uses, or the CPU where there is none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.device(accelerator.type, torch.accelerator.current_device_index()) if accelerator else CPU


def name(device: torch.device) -> str:
    """Return a device's name as its maker gives it, or its type where PyTorch has no name for it."""
    described = getattr(torch.get_device_module(device), "get_device_name", None) if is_accelerator(device) else None
    return str(described(device)) if described else device.type


def names() -> list[str]:
    """Return the names of all accelerators of this machine."""
    kind = current().type
    return [] if kind == "cpu" else [name(torch.device(kind, i)) for i in range(torch.accelerator.device_count())]


def synchronize(device: torch.device) -> None:
    """Wait until a device has done all work that was queued for it."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def memory_size(device: torch.device) -> int | None:
    """Return the bytes of an accelerator's memory, or None for a CPU and for an accelerator that does not tell."""
    return _if_told(lambda: int(torch.accelerator.get_memory_info(device)[1])) if is_accelerator(device) else None


def memory_peak(device: torch.device) -> float | None:
    """Return the most memory in GiB that tensors of this process took on an accelerator so far, or None where the
    accelerator does not count it."""
    return _if_told(lambda: torch.accelerator.max_memory_allocated(device) / 2**30)


@contextmanager
def one_thread() -> Iterator[None]:
    """A context in which PyTorch computes on one thread, as in a loader process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _if_told(ask: Callable[[], T]) -> T | None:
    try:
        return ask()
    except (AttributeError, RuntimeError, NotImplementedError):  # PyTorch does not know it of every device
        return None
