"""Chooses how often each sample is read in an epoch, as a pure function of its weight, the seed and the epoch.

A sample of weight 2.3 is read two or three times in an epoch, 2.3 times on average. A sample of weight 0 is never read.
Every epoch has the same number of readings. The readings of a sample are in different visits of its block, which are
shuffled independently, so that a batch seldom holds an image twice."""

import functools
import hashlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eagleray.base.errors import UserError

FEW = 0.1  # if less than this fraction of all bytes is read, shards of the read samples alone are advised
MOST = 1000.0  # largest weight: a larger one is a mistake, and readings are counted in 16 bits
CHUNK = 2**20  # samples processed at a time; it decides which random numbers are drawn
STREAM = 3  # random stream; the orders of blocks and samples use other streams of the seed


@dataclass(frozen=True, eq=False)
class Selection:
    """The number of times that each of N samples is read in an epoch."""

    weight: NDArray[np.float32]  # (N,) mean number of readings of each sample in an epoch
    kept_bytes: int = 1  # bytes of the samples that are read at all
    bytes: int = 1  # bytes of all samples
    left_out: tuple[dict[str, int], ...] = ()  # number of unread samples of each source, by reason

    @functools.cached_property
    def whole(self) -> int:
        """The sum of all weights, each rounded down."""
        return sum(int(np.floor(part).sum(dtype=np.float64)) for part in self._parts())

    @functools.cached_property
    def rest(self) -> float:
        """The sum of the fractional parts of the weights."""
        return sum(float((part - np.floor(part)).sum(dtype=np.float64)) for part in self._parts())

    @property
    def total(self) -> int:
        """Return the number of readings in an epoch, the rounded sum of the weights. Fractions give at least one."""
        return self.whole + max(round(self.rest), int(self.rest > 0))

    @functools.cached_property
    def kept(self) -> int:
        """The number of samples that are read at all."""
        return int(np.count_nonzero(self.weight))

    def __str__(self) -> str:
        each = f"{self.kept_bytes / self.kept / 1000:,.1f} kB each"
        text = f"{self.kept:,} of {len(self.weight):,} samples are read, {self.total:,} times an epoch, {each}"
        few = self.kept_bytes < FEW * self.bytes
        return f"{text}; shards of them alone are read faster: eagleray prepare webdataset --where" if few else text

    @functools.cached_property
    def digest(self) -> str:
        """A digest of all weights, and of how they are rounded if some are fractional."""
        exact = "-exact" if self.rest else ""
        return hashlib.sha256(self.weight.tobytes()).hexdigest()[:16] + exact

    def copies(self, *, seed: int, epoch: int) -> NDArray[np.uint16]:
        """Return how often each sample (N,) is read in an epoch: its weight, rounded down or up.

        This is systematic sampling: the fractional parts are laid end to end along a line in random order, and a sample
        is read once more if a point 1 - u, 2 - u, 3 - u, ... lies in its part. u is drawn for each epoch from those
        values for which the number of points is the same in every epoch."""
        u = float(np.random.default_rng((seed, epoch, STREAM)).random())
        spare = self.total - self.whole - self.rest
        u = max(spare, 0.0) + u * (1 - abs(spare))  # floor(x + u) of the points are at most x
        out, end, reached, left = np.empty(len(self.weight), np.uint16), 0.0, 0, self.total
        for number, part in enumerate(self._parts()):
            rows = out[number * CHUNK : number * CHUNK + len(part)]
            rows[:] = part  # rounds down
            order = np.random.default_rng((seed, epoch, STREAM, 1 + number)).permutation(len(part))
            rest = (part - rows)[order]
            ends = end + np.cumsum(rest, dtype=np.float64)
            points = np.floor(ends + u).astype(np.int64)
            left -= int(rows.sum())
            if number * CHUNK + len(part) == len(out):  # rounding errors must not change the sum, or read a weight of 0
                may = np.flatnonzero(rest)
                points = np.minimum(points, reached + left)
                points[may[-1] if len(may) else len(rest) :] = reached + left
            more = np.diff(points, prepend=reached)
            rows[order] += more.astype(np.uint16)
            left -= int(points[-1]) - reached
            end, reached = float(ends[-1]), int(points[-1])
        return out

    def _parts(self) -> list[NDArray[np.float32]]:
        return [self.weight[i : i + CHUNK] for i in range(0, len(self.weight), CHUNK)]


class Visits(NamedTuple):
    """The M visits of an epoch, sorted by block. Visit number c of a block, counted from 0, reads its samples with more
    than c readings in the epoch."""

    blocks: NDArray[np.int64]  # (M,) block of each visit
    sizes: NDArray[np.int64]  # (M,) number of samples of each visit

    def number(self, visit: int) -> int:
        """Return how many visits of the same block come before a visit."""
        return visit - int(np.searchsorted(self.blocks, self.blocks[visit]))


def visits_of(copies: NDArray[np.uint16], starts: NDArray[np.int64]) -> Visits:
    """Return the visits of an epoch. Samples are read `copies` (N,) times, and blocks begin at `starts` (B + 1,)."""
    most = np.maximum.reduceat(copies, starts[:-1]).astype(np.int64) if len(copies) else np.zeros(0, np.int64)
    blocks = np.repeat(np.arange(len(most)), most)
    sizes = np.empty(len(blocks), np.int64)
    first, many = np.cumsum(most) - most, np.diff(starts)  # first visit of each block, and number of its samples
    for c in range(int(most.max(initial=0))):
        if not (busy := most > c).all():  # one large weight must cost work for its own block only
            copies = copies[np.repeat(busy, many)]
            first, many, most = first[busy], many[busy], most[busy]
        sizes[first + c] = np.add.reduceat(copies > c, np.cumsum(many) - many, dtype=np.int64)
    return Visits(blocks, sizes)


def check_weights(weight: NDArray[np.float64], name: str) -> None:
    """Raises UserError for weights that are negative, not finite, above MOST or all zero."""
    wrong = ~np.isfinite(weight) | (weight < 0)
    if wrong.any():
        example = float(weight[np.argmax(wrong)])
        raise UserError(f"{name}: {int(wrong.sum())} samples have a weight such as {example:g}; expected 0 or more")
    if weight.max(initial=0) > MOST:
        raise UserError(f"{name}: a sample has a weight of {weight.max():g}; expected at most {MOST:g}")
    if not weight.any():
        raise UserError(f"{name}: leaves none of {len(weight)} samples")
