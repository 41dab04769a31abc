"""Clusters vectors of length 1 by k-means with cosine similarity, on several levels.

Each rank reads its share of the vectors in each pass. As in "Automatic Data Curation for Self-Supervised Learning: A
Clustering-Based Approach" (arXiv:2405.15613), an upper level clusters the centres of the level below. It is clustered
again several times, only from the vectors nearest to its centres. This spreads the centres evenly, so that a subject
with many images gets few centres. The lowest level is clustered once.

The vectors to which the lowest level is fitted, and its first centres, depend on the values of the vectors and a seed,
but not on their order."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from eagleray.base import dist

Vectors = Callable[[int], Iterable[Tensor]]  # takes the index of a pass, returns this rank's vectors in pieces (n, D)
Keep = Callable[[int, Tensor], object]  # takes the number of rounds done and the centres (k, D) after them
FITTED = 256  # mean number of vectors per cluster to which the lowest level's centres are fitted
FITTED_AT_LEAST = 2**16  # least number of vectors to which centres are fitted, if there are as many
CANDIDATES = 4  # mean number of vectors per cluster from which the first centres are drawn
CANDIDATES_AT_LEAST = 4096
BEGUN = 4096  # largest number of rounds in which the first centres are drawn; for more centres, several per round
PIECE = 4096  # number of vectors that are read or hashed at once
ROUNDS = 20  # k-means ends after this many rounds
RESAMPLED = 10  # how often an upper level is clustered again from the vectors around its centres
COMPARED = 2**24  # largest number of similarities that are computed at once
FAR = 64  # most empty clusters per round whose new centres are vectors, those farthest from their centres


class Level(NamedTuple):
    """A level of k clusters: `centres` (k, D), and `members` (n,), the cluster of each centre of the level below."""

    centres: Tensor
    members: Tensor


def nearest(x: Tensor, centres: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each vector x (n, D) the index (n,) of the most similar centre, and the cosine similarity (n,)."""
    found = [similarity.max(1) for similarity in _similarities(x, centres)]
    return torch.cat([f.indices for f in found]), torch.cat([f.values for f in found])


def nearest_few(x: Tensor, centres: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return for each vector x (n, D) the m most similar centres (n, m), most similar first, where m is at most
    `count`, and the cosine similarity (n,) to the first of them."""
    found = [similarity.topk(min(count, len(centres)), dim=1) for similarity in _similarities(x, centres)]
    return torch.cat([f.indices for f in found]), torch.cat([f.values[:, 0] for f in found])


def _similarities(x: Tensor, centres: Tensor) -> Iterator[Tensor]:
    """Yield the cosine similarities (p, k) of pieces of the vectors x (n, D) to the centres (k, D)."""
    return (piece @ centres.T for piece in x.split(max(COMPARED // len(centres), 1)))


def numbers_of(x: NDArray[np.float32], seed: int) -> NDArray[np.float64]:
    """Return a hash of each vector x (n, D) as a number from 0 to 1, which looks random but is the same for equal
    vectors. The hash sums the bit patterns of the values, each times a random factor (multiply-shift hashing)."""
    factors = np.random.default_rng(seed).integers(0, 2**64, x.shape[1], dtype=np.uint64)
    pieces = [x[i : i + PIECE].view(np.uint32).astype(np.uint64) @ factors for i in range(0, len(x), PIECE)]
    bits = np.concatenate([*pieces, np.zeros(0, np.uint64)])
    return (bits >> np.uint64(11)).astype(np.float64) * np.float64(2.0**-53)


def shares(samples: int, clusters: int) -> tuple[float, float]:
    """Return two shares of all samples: to which centres are fitted, and from which the first centres are drawn."""
    fitted, drawn = max(FITTED * clusters, FITTED_AT_LEAST), max(CANDIDATES * clusters, CANDIDATES_AT_LEAST)
    return fitted / samples, drawn / samples


def kmeans(
    vectors: Vectors, centres: Tensor, rounds: int = ROUNDS, *, done: int = 0, keep: Keep | None = None
) -> Tensor:
    """Improve `centres` (k, D), the result of `done` rounds, until `rounds` are done or no centre changes, and return
    them. A cluster that loses all its vectors gets as its centre one of the vectors farthest from their centres."""
    for number in range(done, rounds):
        sums = centres.new_zeros(len(centres), centres.shape[1] + 1, dtype=torch.float64)  # last column: their number
        far = centres.new_zeros(0, centres.shape[1] + 1)  # last column: similarity
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
    """Return the FAR rows (n, D + 1) with the lowest similarity, which is their last column."""
    return rows[rows[:, -1].argsort()[:FAR]]


def spread(x: Tensor, count: int, seed: int) -> Tensor:
    """Draw the first centres (count, D) from the vectors x (n, D) by k-means++: each with a probability proportional to
    its squared distance to the nearest one drawn before. If `count` exceeds BEGUN, several are drawn per round."""
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
    """Cluster the centres x (n, D) of the level below, all of which every rank has."""
    centres = kmeans(lambda _: [x], spread(x, clusters, seed))
    around = max(len(x) // (2 * clusters), 1)
    for _ in range(RESAMPLED):
        sample = x[_around(x, centres, around)]
        centres = kmeans(lambda _, sample=sample: [sample], centres)  # type: ignore[misc]
    return Level(centres, nearest(x, centres)[0])


def _around(x: Tensor, centres: Tensor, count: int) -> Tensor:
    """Return the indices of the vectors x (n, D) that are among the `count` nearest to their centre."""
    label, similarity = nearest(x, centres)
    order = similarity.argsort(descending=True, stable=True)
    order = order[label[order].argsort(stable=True)]
    first = torch.searchsorted(label[order].contiguous(), label[order].contiguous())
    return order[torch.arange(len(x), device=x.device) - first < count]


def upper_levels(centres: Tensor, sizes: Sequence[int], seed: int) -> list[Tensor]:
    """Cluster the lowest level's centres (k, D) into upper levels of `sizes` clusters, from the lowest up. Return for
    each upper level the cluster to which each cluster of the level below belongs."""
    parents: list[Tensor] = []
    for clusters in sizes:
        centres, members = upper_level(centres, min(clusters, len(centres)), seed)
        parents.append(members)
    return parents
