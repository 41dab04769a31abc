"""Encode the classes of an image in one integer: a bit for each class that is present, and another for each difficult
one.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

CLASSES = 20  # PASCAL VOC's; twice as many bits still fit into the 18 digits that a label may have


def bits(marks: Sequence[int]) -> int:
    """Encode marks (20,) as a label; a mark is 1 for present, 0 for absent and -1 for difficult."""
    assert len(marks) == CLASSES
    return sum(1 << c if mark > 0 else 1 << (c + CLASSES) for c, mark in enumerate(marks) if mark)


def marks(labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Decode labels (n,) into marks (n, 20)."""
    digits = labels[:, None] >> np.arange(2 * CLASSES) & 1
    return digits[:, :CLASSES] - digits[:, CLASSES:]
