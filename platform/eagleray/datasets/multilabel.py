"""Several classes of an image in one label: a bit for each that is there, and one for each that is hard to tell."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

CLASSES = 20  # PASCAL VOC's: twice as many bits are less than the 18 digits that a label may have


def bits(marks: Sequence[int]) -> int:
    """The label of marks (20,): 1 where the class is there, 0 where not, -1 where it is hard to tell."""
    assert len(marks) == CLASSES
    return sum(1 << c if mark > 0 else 1 << (c + CLASSES) for c, mark in enumerate(marks) if mark)


def marks(labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """The marks (n, 20) of labels (n,)."""
    each = labels[:, None] >> np.arange(2 * CLASSES) & 1
    return each[:, :CLASSES] - each[:, CLASSES:]
