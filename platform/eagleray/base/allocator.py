"""Settings of the C library's memory allocator for a process that trains on a CPU."""

import ctypes
import sys
from typing import Any

# Arguments of glibc's mallopt. By default glibc maps each block above M_MMAP_THRESHOLD, which is at most 32 MiB,
# separately, and unmaps it when it is freed.
MMAPS, TRIM = (-4, 0), (-1, 2**30)  # (M_MMAP_MAX, 0 blocks) and (M_TRIM_THRESHOLD, 1 GiB)


def keep_freed_memory() -> bool:
    """Make glibc reuse the memory of freed tensors instead of returning it to the system.

    By default glibc returns every large block to the system. Each step then asks for the same pages again, and the
    system fills them with zeros again. Returns whether the C library is glibc and has accepted the settings.
    """
    mallopt = _of_glibc("mallopt")
    return mallopt is not None and all(mallopt(*setting) == 1 for setting in (MMAPS, TRIM))


def give_back() -> None:
    """Return the memory of freed tensors to the system.

    Each thread has its own arena in glibc, whose free memory other threads cannot always use."""
    if trim := _of_glibc("malloc_trim"):
        trim(0)


def _of_glibc(name: str) -> Any:
    """Return a function of the C library, or None if it has none of this name."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None
