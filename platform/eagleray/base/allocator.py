"""Settings of the C library's memory allocator for a process that trains on a CPU."""

import ctypes
import sys
from typing import Any

# Arguments of glibc's mallopt, (parameter, value). By default glibc gives each block above M_MMAP_THRESHOLD, which is
# at most 32 MiB, a mapping of its own, and unmaps it when it is freed. M_MMAP_MAX = 0 allows no such mappings.
# M_TRIM_THRESHOLD = 1 GiB lets glibc keep so much free memory at the end of the heap.
MMAPS, TRIM = (-4, 0), (-1, 2**30)


def keep_freed_memory() -> bool:
    """Make glibc reuse the memory of freed tensors instead of returning it to the system.

    By default glibc returns every large block to the system. Each step then asks for the same pages again, and the
    system fills them with zeros again. Returns whether the C library is glibc and has accepted the settings."""
    mallopt = _of_glibc("mallopt")
    return mallopt is not None and all(mallopt(*setting) == 1 for setting in (MMAPS, TRIM))


def give_back() -> None:
    """Return the memory of freed tensors to the system.

    glibc keeps free memory in an arena per thread, where other threads cannot always use it."""
    if trim := _of_glibc("malloc_trim"):
        trim(0)


def _of_glibc(name: str) -> Any:
    """Return the function `name` of the C library. None: it has no such function, or the system is not Linux."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None
