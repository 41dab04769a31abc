"""Which item of a source goes into which shard: a shuffle, cut into even pieces."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray


@dataclass(frozen=True)
class Order:
    """N items in S shards."""

    order: NDArray[np.int64]  # (N,) items in the order of the shards
    cuts: NDArray[np.int64]  # (S + 1,) first item of each, and N
    seed: int

    @classmethod
    def of(cls, items: pa.Table, *, size: int, seed: int) -> "Order":
        """Shuffled; what is read together stays together, and is shuffled within its shard."""
        group, url = items["group"].to_numpy(), items["url"]
        new = np.r_[True, (group[1:] != group[:-1]) | (group[1:] < 0) | pc.not_equal(url[1:], url[:-1]).to_numpy()]
        number = np.cumsum(new) - 1  # (N,) of what is read together
        place = np.random.default_rng([seed, 0]).permutation(number[-1] + 1)
        order = np.argsort(place[number], kind="stable")
        return cls(order, cut(items["size"].to_numpy()[order], size), seed)

    def __len__(self) -> int:
        return len(self.cuts) - 1

    def rows(self, shard: int) -> NDArray[np.int64]:
        mine = self.order[self.cuts[shard] : self.cuts[shard + 1]]
        return np.random.default_rng([self.seed, 1, shard]).permutation(mine)


def cut(sizes: NDArray[np.int64], target: int) -> NDArray[np.int64]:
    """First items of runs of about `target` bytes, all about equally large, and N; sizes are (N,)."""
    ends = np.cumsum(sizes)
    pieces = max(-(-int(ends[-1]) // target), 1)
    inner = np.searchsorted(ends, ends[-1] * (np.arange(1, pieces) / pieces), "right")
    return np.unique(np.r_[0, inner, len(sizes)]).astype(np.int64)
