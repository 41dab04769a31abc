"""A stored file as every store describes it, and reusable buffers for its bytes."""

import weakref
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SMALL = 2**20  # bytes; what is smaller is malloc's business
UNIT = 20 * SMALL  # bytes; buffers come in multiples of it: one serves any usual block, and costs what is used of it
SPARE = 16  # buffers at most that wait for the next block; never more than there were blocks


@dataclass(frozen=True, slots=True)
class Blob:
    url: str
    size: int  # bytes
    tag: str = ""  # s3: the ETag; local files get theirs from `Store.tag`, when it is needed


spare_buffers: deque[NDArray[np.uint8]] = deque(maxlen=SPARE)


def new_buffer(length: int) -> memoryview:
    """Return a buffer of `length` bytes with arbitrary content.

    The buffer of a block is reused once nobody holds it: fresh memory costs more time than the bytes that go into it,
    and malloc would fragment it further with every epoch.
    """
    if length < SMALL:
        return memoryview(bytearray(length))
    base = _take_spare(length)
    if base is None:
        base = np.empty(-(-length // UNIT) * UNIT, np.uint8)
    view = base[:length]
    weakref.finalize(view, spare_buffers.append, base).atexit = False
    return memoryview(view)  # type: ignore[arg-type]


def _take_spare(length: int) -> NDArray[np.uint8] | None:
    """Take a spare buffer that fits, or return None; other threads may take and return some meanwhile."""
    for _ in range(len(spare_buffers)):
        try:
            base = spare_buffers.popleft()
        except IndexError:
            return None
        if length <= len(base) <= max(UNIT, 2 * length):
            return base
        spare_buffers.append(base)
    return None
