"""Divide the rows of a table of features among the ranks, in order, so that no rank holds all of them."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eagleray.base import dist

BATCH = 256  # images in a forward pass; a batch is never divided, so that it is the same on any number of ranks


def own_samples(samples: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return this rank's share of the samples: neighbouring whole batches."""
    batches = -(-len(samples) // BATCH)
    first, last = (BATCH * (batches * rank // dist.size()) for rank in (dist.rank(), dist.rank() + 1))
    return samples[first:last]


@dataclass(frozen=True)
class Shard:
    """The rows of a table that this rank holds: `rows` of the `total` rows, from the row `first` on."""

    first: int
    rows: int
    total: int

    @classmethod
    def of(cls, rows: int) -> "Shard":
        """Return the shard of a rank that holds so many rows. Called by all ranks together."""
        counts = dist.gather_objects(rows)
        return cls(sum(counts[: dist.rank()]), rows, sum(counts))

    @property
    def last(self) -> int:
        """The row behind the last row of this rank."""
        return self.first + self.rows

    def own(self, rows: Tensor) -> Tensor:
        """Return where this rank holds those of some rows of the table that it has, in the given order."""
        if self.rows == self.total:
            return rows
        return rows[(rows >= self.first) & (rows < self.last)] - self.first

    def read(self, x: Tensor, first: int, last: int) -> Tensor:
        """Return the rows `first` to `last` (excluded) of the table on every rank. `x` are the rows of this rank.

        Called by all ranks together. Floating-point numbers are returned in float32."""
        dtype = torch.float32 if x.is_floating_point() else x.dtype
        if dist.size() == 1:  # a rank that holds all rows still has to give them to the others
            return x[first:last].to(dtype)
        out = x.new_zeros(last - first, *x.shape[1:], dtype=dtype)
        begin, end = max(first, self.first), min(last, self.last)
        if begin < end:
            out[begin - first : end - first] = x[begin - self.first : end - self.first]
        return dist.total(out)  # the other ranks add zeros


def count_classes(*labels: Tensor) -> int:
    """Return the number of classes, counted from 0, in the labels (n,) of all ranks."""
    return 1 + max(dist.gather_objects(max((int(y.max()) for y in labels if len(y)), default=-1)))
