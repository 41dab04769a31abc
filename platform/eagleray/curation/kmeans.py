"""Clusters vectors of length 1 by k-means with cosine similarity, level upon level.

Passes over the vectors are made by all ranks, each over its share. The levels follow "Automatic Data Curation for
Self-Supervised Learning: A Clustering-Based Approach" (arXiv 2405.15613): each level clusters the centres of the one
below. The upper levels are clustered again from what lies around their centres, which spreads these evenly, so that a
subject with many images gets few of them. As there, the lowest level is clustered once.

Which vectors it is fitted to, and which it begins with, depends on the vectors and a seed, but not on their order.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from eagleray.base import dist

Vectors = Callable[[int], Iterable[Tensor]]  # this rank's share (n, D) in pieces, for the pass of that number
Keep = Callable[[int, Tensor], object]  # takes the number of rounds that are done, and their centres
FITTED = 256  # vectors for each cluster of the lowest level that its centres are fitted to, in the mean
FITTED_AT_LEAST = 2**16  # vectors that centres are fitted to at least, if there are as many
CANDIDATES = 4  # vectors for each cluster among which the first centres are drawn
CANDIDATES_AT_LEAST = 4096
BEGUN = 4096  # most turns in which the first centres are drawn
PIECE = 4096  # vectors that are read at once
ROUNDS = 20  # k-means ends after this many rounds
RESAMPLED = 10  # times that a level is clustered again from the vectors around its centres
COMPARED = 2**24  # similarities that are computed at once
FAR = 64  # vectors that are farthest from their centre, of which empty clusters are begun again


class Level(NamedTuple):
    """A level of clusters: their centres (k, D), and the cluster of this level that each one of the level below is in,
    or that each vector is in."""

    centres: Tensor
    members: Tensor


def nearest(x: Tensor, centres: Tensor) -> tuple[Tensor, Tensor]:
    """Return the centre (n,) that each vector (n, D) is most similar to, and that cosine similarity (n,)."""
    found = [(piece @ centres.T).max(1) for piece in x.split(max(COMPARED // len(centres), 1))]
    return torch.cat([f.indices for f in found]), torch.cat([f.values for f in found])


def nearest_few(x: Tensor, centres: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the centres (n, m) that each vector (n, D) is most similar to, at most `count` and the nearest first, and
    the cosine similarity (n,) to the nearest."""
    count, pieces = min(count, len(centres)), x.split(max(COMPARED // len(centres), 1))
    found = [(piece @ centres.T).topk(count, dim=1) for piece in pieces]
    return torch.cat([f.indices for f in found]), torch.cat([f.values[:, 0] for f in found])


def numbers_of(x: NDArray[np.float32], seed: int) -> NDArray[np.float64]:
    """Return a number from 0 to 1 for each vector (n, D) that looks random, but is the same for equal vectors. Its bits
    are a sum of the vector's values, each times a random factor (multiply-shift hashing)."""
    factors = np.random.default_rng(seed).integers(0, 2**64, x.shape[1], dtype=np.uint64)
    pieces = [x[i : i + PIECE].view(np.uint32).astype(np.uint64) @ factors for i in range(0, len(x), PIECE)]
    bits = np.concatenate([*pieces, np.zeros(0, np.uint64)])
    return (bits >> np.uint64(11)).astype(np.float64) * np.float64(2.0**-53)


def shares(samples: int, clusters: int) -> tuple[float, float]:
    """Return which share of all samples the centres are fitted to, and which share the first ones are drawn from."""
    fitted, drawn = max(FITTED * clusters, FITTED_AT_LEAST), max(CANDIDATES * clusters, CANDIDATES_AT_LEAST)
    return fitted / samples, drawn / samples


def kmeans(
    vectors: Vectors, centres: Tensor, rounds: int = ROUNDS, *, done: int = 0, keep: Keep | None = None
) -> Tensor:
    """Return the centres (k, D) of clusters, from those of `done` rounds, after so many rounds or when they stay. A
    cluster that loses all its vectors begins again at one of those that are farthest from their centres."""
    for number in range(done, rounds):
        sums = centres.new_zeros(len(centres), centres.shape[1] + 1, dtype=torch.float64)  # the last column counts
        far = centres.new_zeros(0, centres.shape[1] + 1)  # the last column is the similarity
        for x in vectors(number):
            label, similarity = nearest(x, centres)
            sums.index_add_(0, label, functional.pad(x.double(), (0, 1), value=1))
            far = _farthest(torch.cat([far, torch.cat([x, similarity[:, None]], 1)]))
        sums = dist.total(sums)
        empty = (sums[:, -1] == 0).nonzero()[:, 0]
        new = functional.normalize(sums[:, :-1], dim=1).to(centres.dtype)
        new[empty] = centres[empty]
        if len(empty):
            everywhere = torch.cat([part.to(centres.device) for part in dist.gather_objects(far.cpu())])
            begun = _farthest(everywhere)[: len(empty), :-1]
            new[empty[: len(begun)]] = begun
        if torch.equal(new, centres):
            break
        centres = new
        if keep:
            keep(number + 1, centres)
    return centres


def _farthest(rows: Tensor) -> Tensor:
    """Return the rows (n, D + 1) with the lowest similarity, which is their last column."""
    return rows[rows[:, -1].argsort()[:FAR]]


def spread(x: Tensor, count: int, seed: int) -> Tensor:
    """Return vectors (count, D) of some (n, D) to begin with: each is drawn with a probability that grows with the
    squared distance to the nearest of those before it (k-means++). Above BEGUN several are drawn in a turn."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(len(x), (1,), generator=generator)
    distance, latest = torch.full((len(x),), torch.inf), chosen
    while len(chosen) < count:
        distance = distance.minimum((1 - x @ x[latest].T).amin(1).clamp(min=0).cpu())
        far = int(distance.count_nonzero())
        latest = torch.multinomial(
            (distance if far else torch.ones_like(distance)).double(),
            max(min(-(-count // BEGUN), count - len(chosen), far), 1),
            generator=generator,
        )
        chosen = torch.cat([chosen, latest])
    return x[chosen]


def upper_level(x: Tensor, clusters: int, seed: int) -> Level:
    """Cluster the centres (n, D) of the level below, of which every rank has all."""
    centres = kmeans(lambda _: [x], spread(x, clusters, seed))
    around = max(len(x) // (2 * clusters), 1)
    for _ in range(RESAMPLED):
        sample = x[_around(x, centres, around)]
        centres = kmeans(lambda _, sample=sample: [sample], centres)  # type: ignore[misc]
    return Level(centres, nearest(x, centres)[0])


def _around(x: Tensor, centres: Tensor, count: int) -> Tensor:
    """Return the rows of x (n, D) that are among the `count` nearest of their centre."""
    label, similarity = nearest(x, centres)
    order = similarity.argsort(descending=True, stable=True)
    order = order[label[order].argsort(stable=True)]
    first = torch.searchsorted(label[order].contiguous(), label[order].contiguous())
    return order[torch.arange(len(x), device=x.device) - first < count]


def upper_levels(centres: Tensor, sizes: Sequence[int], seed: int) -> list[Tensor]:
    """Return for each level above the lowest the cluster there of each cluster below. `centres` (k, D) are those of the
    lowest level, and `sizes` the clusters of the levels above it, from the lowest up."""
    parents: list[Tensor] = []
    for clusters in sizes:
        centres, members = upper_level(centres, min(clusters, len(centres)), seed)
        parents.append(members)
    return parents
