"""Assign the items of a source to shards: shuffle them, then divide them into shards of about equal size."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray


@dataclass(frozen=True)
class ShardAssignment:
    """The assignment of N items (the images of a source) to S shards."""

    order: NDArray[np.int64]  # (N,) indices of the items, one shard after the other
    cuts: NDArray[np.int64]  # (S + 1,) position in `order` of the first item of each shard, and N
    seed: int

    @classmethod
    def shuffle(cls, items: pa.Table, *, size: int, seed: int) -> "ShardAssignment":
        """Shuffle the items and divide them into shards of about `size` bytes.

        The rows of a Parquet row group are read together. Therefore they stay neighbours here, and `rows` shuffles them
        within their shard."""
        group, url = items["group"].to_numpy(), items["url"]
        starts = np.r_[True, (group[1:] != group[:-1]) | (group[1:] < 0) | pc.not_equal(url[1:], url[:-1]).to_numpy()]
        unit = np.cumsum(starts) - 1  # (N,) index of the unit, a row group or one item, that each item is read in
        rank = np.random.default_rng([seed, 0]).permutation(unit[-1] + 1)
        order = np.argsort(rank[unit], kind="stable")
        return cls(order, cut_evenly(items["size"].to_numpy()[order], size), seed)

    def __len__(self) -> int:
        return len(self.cuts) - 1

    def rows(self, shard: int) -> NDArray[np.int64]:
        """Return the indices, from 0 to N - 1, of a shard's items in the order in which they are written."""
        members = self.order[self.cuts[shard] : self.cuts[shard + 1]]
        return np.random.default_rng([self.seed, 1, shard]).permutation(members)


def cut_evenly(sizes: NDArray[np.int64], target: int) -> NDArray[np.int64]:
    """Cut N consecutive items of `sizes` (N,) bytes into pieces of about `target` bytes.

    Returns the position of the first item of each piece, followed by N."""
    ends = np.cumsum(sizes)
    pieces = max(-(-int(ends[-1]) // target), 1)
    inner = np.searchsorted(ends, ends[-1] * (np.arange(1, pieces) / pieces), "right")
    return np.unique(np.r_[0, inner, len(sizes)]).astype(np.int64)
