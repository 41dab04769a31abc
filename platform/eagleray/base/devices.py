"""The accelerator of this process, whichever maker it is from: NVIDIA, AMD, Intel, Apple or another that PyTorch knows.

The rest of the code asks these functions, and `torch.Stream` and `torch.Event`, instead of `torch.cuda`.
"""

import torch
from torch import Tensor

CPU = torch.device("cpu")


def is_accelerator(device: torch.device) -> bool:
    """Return whether the host gives work to a device and goes on, instead of computing itself."""
    return device.type not in ("cpu", "meta")


def available() -> bool:
    """Return whether this process can use an accelerator."""
    return torch.accelerator.is_available()


def current() -> torch.device:
    """Return the accelerator that this process uses, or the CPU where there is none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.device(accelerator.type, torch.accelerator.current_device_index()) if accelerator else CPU


def name(device: torch.device) -> str:
    """Return a device's name as its maker gives it, or its type where the maker gives none; `cpu` for the CPU."""
    described = getattr(torch.get_device_module(device), "get_device_name", None) if is_accelerator(device) else None
    return str(described(device)) if described else device.type


def names() -> list[str]:
    """Return the names of all accelerators of this machine."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    return [name(torch.device(kind.type, i)) for i in range(torch.accelerator.device_count())] if kind else []


def synchronize(device: torch.device) -> None:
    """Wait until a device has done all its work; a CPU has none left."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def memory_peak(device: torch.device) -> float | None:
    """Return the most memory in GiB that tensors of this process took on an accelerator so far, or None where the
    accelerator does not count it."""
    try:
        return torch.accelerator.max_memory_allocated(device) / 2**30
    except (AttributeError, RuntimeError, NotImplementedError):  # of a device, or a PyTorch before 2.9, that cannot
        return None


def keep(tensor: Tensor, stream: torch.Stream) -> None:
    """Keep the memory of a tensor that another stream made until the work now queued on `stream` is done."""
    tensor.record_stream(stream)  # type: ignore[arg-type]
