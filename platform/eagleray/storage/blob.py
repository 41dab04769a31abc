"""Describes a stored file, and lends reusable buffers for its content."""

import weakref
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SMALL = 2**20  # bytes; smaller buffers are not reused
UNIT = 20 * SMALL  # bytes; buffer sizes are multiples of it, so that one fits most blocks (unused pages take no memory)
SPARE = 16  # largest number of unused buffers kept for later blocks


@dataclass(frozen=True, slots=True)
class Blob:
    """A stored file: its URL, its size and a tag that changes with its content."""

    url: str
    size: int  # bytes
    tag: str = ""  # such as a remote file's ETag; empty for a local file until `Store.tag` computes it


spare_buffers: deque[NDArray[np.uint8]] = deque(maxlen=SPARE)


def new_buffer(length: int) -> memoryview:
    """Return a buffer of `length` bytes with arbitrary content.

    Buffers from SMALL bytes on are reused once nothing refers to them: allocating fresh memory takes longer than
    filling it, and would fragment malloc's memory more with every epoch."""
    if length < SMALL:
        return memoryview(bytearray(length))
    base = _take_spare(length)
    if base is None:
        base = np.empty(-(-length // UNIT) * UNIT, np.uint8)
    view = base[:length]
    weakref.finalize(view, spare_buffers.append, base).atexit = False
    return memoryview(view)  # type: ignore[arg-type]


def _take_spare(length: int) -> NDArray[np.uint8] | None:
    """Return a spare buffer, neither too short nor far too long, or None. Other threads may take buffers meanwhile."""
    for _ in range(len(spare_buffers)):
        try:
            base = spare_buffers.popleft()
        except IndexError:
            return None
        if length <= len(base) <= max(UNIT, 2 * length):
            return base
        spare_buffers.append(base)
    return None
