"""The accelerator of this process, whichever maker it is from: NVIDIA, AMD, Intel, Apple or another that PyTorch knows.

The rest of the code asks these functions, and uses `torch.Stream`, `torch.Event` and `torch.accelerator`, instead of
`torch.cuda`. Code that runs on CUDA alone says so where it asks.
"""

import torch

CPU = torch.device("cpu")


def is_accelerator(device: torch.device) -> bool:
    """Return whether the host only queues work for a device, instead of computing itself."""
    return device.type not in ("cpu", "meta")


def has_streams(device: torch.device) -> bool:
    """Return whether a device copies from pinned memory while it computes. Apple's has one stream and the host's
    memory."""
    return is_accelerator(device) and device.type != "mps"


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
    try:
        return int(torch.accelerator.get_memory_info(device)[1]) if is_accelerator(device) else None
    except (AttributeError, RuntimeError, NotImplementedError):  # some devices, and PyTorch before 2.9, cannot tell
        return None


def memory_peak(device: torch.device) -> float | None:
    """Return the most memory in GiB that tensors of this process took on an accelerator so far, or None where the
    accelerator does not count it."""
    try:
        return torch.accelerator.max_memory_allocated(device) / 2**30
    except (AttributeError, RuntimeError, NotImplementedError):  # some devices, and PyTorch before 2.9, cannot tell
        return None
