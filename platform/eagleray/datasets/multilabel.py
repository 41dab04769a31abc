"""Encode an image's classes in one integer. Each class has a bit for being present and a bit for being difficult."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

CLASSES = 20  # number of PASCAL VOC's classes; twice as many bits fit into the 18 digits that a label may have


def bits(marks: Sequence[int]) -> int:
    """Encode marks (20,) as a label. A mark is 1 for a present class, 0 for an absent one and -1 for a difficult
    one."""
    assert len(marks) == CLASSES
    return sum(1 << c if mark > 0 else 1 << (c + CLASSES) for c, mark in enumerate(marks) if mark)


def marks(labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Decode labels (n,) into marks (n, 20): 1, 0 or -1."""
    digits = labels[:, None] >> np.arange(2 * CLASSES) & 1
    return digits[:, :CLASSES] - digits[:, CLASSES:]
