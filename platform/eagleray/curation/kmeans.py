"""Clusters vectors of length 1 by k-means with cosine similarity, level upon level.

Passes over the vectors are made by all ranks, each over its share. The levels follow "Automatic Data Curation for
Self-Supervised Learning: A Clustering-Based Approach" (arXiv 2405.15613): each level clusters the centres of the one
below. The upper levels are clustered again from what lies around their centres, which spreads these evenly, so that a
subject with many images gets few of them. As there, the lowest level is clustered once.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from eagleray.base import dist

Vectors = Callable[[int], Iterable[Tensor]]  # this rank's share (n, D) in pieces, for the pass of that number
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


def kmeans(vectors: Vectors, centres: Tensor, rounds: int = ROUNDS) -> Tensor:
    """Return the centres (k, D) of clusters, from first ones, after so many rounds or when they stay. A cluster that
    loses all its vectors begins again at one of those that are farthest from their centres."""
    for number in range(rounds):
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
    return centres


def _farthest(rows: Tensor) -> Tensor:
    """Return the rows (n, D + 1) with the lowest similarity, which is their last column."""
    return rows[rows[:, -1].argsort()[:FAR]]


def spread(x: Tensor, count: int, seed: int) -> Tensor:
    """Return vectors (count, D) of some (n, D) to begin with: each is drawn with a probability that grows with the
    squared distance to the nearest of those before it (k-means++)."""
    generator = torch.Generator().manual_seed(seed)
    chosen = [int(torch.randint(len(x), (1,), generator=generator))]
    distance = torch.full((len(x),), torch.inf)
    while len(chosen) < count:
        distance = distance.minimum((1 - x @ x[chosen[-1]]).clamp(min=0).cpu())
        weights = distance if distance.any() else torch.ones_like(distance)
        chosen.append(int(torch.multinomial(weights.double(), 1, generator=generator)))
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


def hierarchy(vectors: Vectors, first: Tensor, sizes: Sequence[int], seed: int) -> tuple[Tensor, list[Tensor]]:
    """Return the centres (k, D) of the lowest level, from first ones, and for each level above the cluster there of
    each cluster below. `sizes` are the clusters of all levels, from the lowest up."""
    lowest = centres = kmeans(vectors, first)
    parents: list[Tensor] = []
    for clusters in sizes[1:]:
        centres, members = upper_level(centres, min(clusters, len(centres)), seed)
        parents.append(members)
    return lowest, parents
