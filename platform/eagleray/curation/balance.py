"""Divides the samples of an epoch evenly among clusters, level by level from the top.

"Automatic Data Curation for Self-Supervised Learning" (arXiv:2405.15613) draws its samples in this way."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def even(sizes: Floats, total: float) -> Floats:
    """Return how many of `total` samples each cluster gets (k,), given the clusters' `sizes` (k,): all get the same
    number, except that smaller clusters get all that they have and the others share the rest."""
    order = np.sort(sizes)
    left, sharing = total - np.r_[0, np.cumsum(order)[:-1]], len(sizes) - np.arange(len(sizes))
    enough = np.flatnonzero(order * sharing >= left)
    level = left[enough[0]] / sharing[enough[0]] if len(enough) else np.inf
    return np.minimum(sizes, level)


def shares(sizes: Floats, parents: Sequence[NDArray[np.int64]], total: float) -> Floats:
    """Return how many of `total` samples each cluster of the lowest level gets (k,). The total is divided evenly among
    the clusters of the highest level, then each cluster's part among its clusters on the level below. `sizes` (k,) are
    those of level 0, the lowest; `parents[i]` has for each cluster of level i the one of level i + 1 that it is in."""
    levels = [sizes]
    for level, members in enumerate(parents, 1):
        clusters = len(parents[level]) if level < len(parents) else 0
        levels.append(np.bincount(members, weights=levels[-1], minlength=clusters).astype(np.float64))
    got = even(levels[-1], total)
    for members, below in zip(reversed(parents), reversed(levels[:-1]), strict=True):
        order = np.argsort(members, kind="stable")
        parts = np.split(order, np.searchsorted(members[order], np.arange(1, len(got))))
        each = np.zeros(len(below))
        for part, amount in zip(parts, got, strict=True):
            each[part] = even(below[part], amount) if len(part) else 0
        got = each
    return got
