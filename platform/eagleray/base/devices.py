"""The accelerator of this process, of any maker: NVIDIA, AMD, Intel, Apple or another that PyTorch supports.

Other modules use these functions, `torch.Stream`, `torch.Event` and `torch.accelerator` instead of `torch.cuda`. Code
that runs only on CUDA says so where it checks the device."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

import torch

from eagleray.base.contexts import replaced

CPU = torch.device("cpu")
T = TypeVar("T")
WIDE_SUMS = {"cuda"}  # device types (NVIDIA and AMD) whose `torch.mm` can multiply 16-bit matrices into float32
_pretending = False


def is_accelerator(device: torch.device) -> bool:
    """Return whether a device computes apart from the host, which only queues work for it: not the CPU, nor "meta"."""
    return _kind(device) not in ("cpu", "meta")


def has_wide_sums(device: torch.device) -> bool:
    """Return whether `torch.mm` and `torch.addmm` accept `out_dtype` on a device."""
    return _kind(device) in WIDE_SUMS


def pretending() -> AbstractContextManager[None]:
    """A context in which this module treats the CPU as a CUDA device. It is for tracing steps with PyTorch's
    FakeTensors, which a machine without the accelerator can create only on the CPU."""
    return replaced(sys.modules[__name__], "_pretending", True)  # a global is enough: one step is traced at a time


def _kind(device: torch.device) -> str:
    return "cuda" if _pretending and device.type == "cpu" else device.type


def has_streams(device: torch.device) -> bool:
    """Return whether a device can copy from pinned memory while it computes. Apple's GPU cannot: it has one stream, and
    shares the host's memory."""
    return is_accelerator(device) and device.type != "mps"


def has_float64(device: torch.device) -> bool:
    """Return whether a device computes in float64. Apple's GPU and some of Intel's GPUs do not."""
    return device.type != "mps" and (device.type != "xpu" or bool(torch.xpu.get_device_properties(device).has_fp64))


def current() -> torch.device:
    """Return the accelerator that this process uses, or the CPU if the machine has no accelerator."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.device(accelerator.type, torch.accelerator.current_device_index()) if accelerator else CPU


def name(device: torch.device) -> str:
    """Return a device's name as its maker gives it, or its type if PyTorch has no name for it."""
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
    """Return the memory size of an accelerator in bytes. None: a CPU, or a device whose memory PyTorch cannot tell."""
    return _if_told(lambda: int(torch.accelerator.get_memory_info(device)[1])) if is_accelerator(device) else None


def memory_peak(device: torch.device) -> float | None:
    """Return the peak memory in GiB of this process's tensors on an accelerator, or None if PyTorch cannot tell."""
    return _if_told(lambda: torch.accelerator.max_memory_allocated(device) / 2**30)


@contextmanager
def one_thread() -> Iterator[None]:
    """A context in which PyTorch computes on one thread, as in a process that loads data."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _if_told(ask: Callable[[], T]) -> T | None:
    try:
        return ask()
    except (AttributeError, RuntimeError, NotImplementedError):  # PyTorch cannot answer for this kind of device
        return None
