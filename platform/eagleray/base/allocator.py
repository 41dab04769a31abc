"""Settings of the C library's allocator for a process that trains on a CPU."""

import ctypes
import sys
from typing import Any

# glibc's M_MMAP_MAX and M_TRIM_THRESHOLD. Blocks above M_MMAP_THRESHOLD, which is at most 32 MiB, are mapped one by one
# unless none may be.
MMAPS, TRIM = (-4, 0), (-1, 2**30)  # blocks, bytes


def keep_freed_memory() -> bool:
    """Let glibc keep the memory of freed tensors for the next ones instead of giving it back to the system.

    By default glibc returns every large block to the system. Each step then asks for the same pages again, and the
    system fills them with zeros again.
    Returns whether this system's C library is glibc and has taken the settings.
    """
    mallopt = _of_glibc("mallopt")
    return mallopt is not None and all(mallopt(*setting) == 1 for setting in (MMAPS, TRIM))


def give_back() -> None:
    """Give the memory of freed tensors back to the system.

    Each thread has a part of glibc's memory to itself, so what one has freed another may not find.
    """
    if trim := _of_glibc("malloc_trim"):
        trim(0)


def _of_glibc(name: str) -> Any:
    """Return a function of the C library, or None where it has none of this name."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None
