"""Classify frozen features by the weighted votes of their k nearest neighbours: Wu et al. 2018 (InstDisc),
arXiv:1805.01978, with the settings of DINO's protocol.

Each rank searches among its own training features, and the neighbours that all ranks found are merged. The matrix
products have the same shapes on any number of ranks, and equal similarities are ordered by the position of the training
feature, so that any number of ranks finds the same neighbours, to the last bit."""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from eagleray.base import dist
from eagleray.protocols.features import LabelledFeatures, Shard, count_classes
from eagleray.protocols.settings import Evaluate

CHUNK = 1024  # test images compared at a time
TILE = 4096  # training images with which a chunk is compared at a time
VOTERS = 256  # test images whose votes for all classes are in memory at a time
LARGEST = 64.0  # largest exponent of a weight, as float32 overflows above 88 and k weights are added
NOTHING = torch.iinfo(torch.int64).min  # key that stands for no feature, below all other keys
LOW = 2**32 - 1  # mask of the bits of a key that hold the position


def knn(
    train: LabelledFeatures,
    test: LabelledFeatures,
    *,
    k: int = Evaluate.k,
    ks: Sequence[int] = (),
    temperature: float = Evaluate.temperature,
) -> dict[str, float]:
    """Measure top-1 and top-5 accuracy in percent with k neighbours, and top-1 for each number of neighbours in `ks`.

    The features are those of this rank. Called by all ranks together."""
    accuracy = accuracies(train, test, ks=sorted({k, *ks}), temperature=temperature)
    return {"knn/top1": accuracy[k][0], "knn/top5": accuracy[k][1]} | {f"knn/top1_k{n}": accuracy[n][0] for n in ks}


def accuracies(
    train: LabelledFeatures, test: LabelledFeatures, *, ks: Sequence[int], temperature: float
) -> dict[int, tuple[float, float]]:
    """Return top-1 and top-5 accuracy in percent for each number of neighbours in `ks`, from a single search.

    Called by all ranks together."""
    classes, bank, tests = count_classes(train.y, test.y), Bank(train), Shard.of(len(test.x))
    k = min(max(ks), bank.shard.total)
    hits = torch.zeros(len(ks), 2, dtype=torch.long, device=test.x.device)
    for number, first in enumerate(range(0, tests.total, CHUNK)):
        last = min(first + CHUNK, tests.total)
        x, y = (tests.read(rows, first, last) for rows in test)
        keys, labels = merge(*dist.together(partial(bank.nearest, F.normalize(x, dim=1), k)))
        if number % dist.size() == dist.rank():
            for cosine, label, truth in zip(*(t.split(VOTERS) for t in (cosines(keys), labels, y)), strict=True):
                hits += count_hits(cosine, label, truth, classes=classes, ks=ks, temperature=temperature)
    counts = dist.total(hits).tolist()
    return {n: (100 * one / tests.total, 100 * five / tests.total) for n, (one, five) in zip(ks, counts, strict=True)}


class Bank:
    """The training features of this rank, which are searched for neighbours.

    A neighbour is represented by a key of 64 bits: the similarity in the upper half, and in the lower half the position
    among the features of all ranks, counted down. Keys are all different, and a larger key is a nearer neighbour."""

    def __init__(self, train: LabelledFeatures) -> None:
        """Called by all ranks together."""
        self.x, self.y, self.shard = *train, Shard.of(len(train.x))
        self.tile = min(TILE, -(-self.shard.total // 64) * 64)
        parts = [part.float().norm(dim=1, keepdim=True) for part in self.x.split(TILE)]
        self.norms = torch.cat(parts).clamp_min(1e-12)  # the smallest norm that F.normalize divides by

    def nearest(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the keys (n, k) of this rank's k features nearest to each of the unit queries x (n, D), in any order,
        and the labels (n, k) of these features."""
        keys = torch.full((len(x), k), NOTHING, device=x.device)
        tile = x.new_empty(self.tile, x.shape[1])
        # Tiles begin at multiples of their size in the table of all ranks. The rows of a tile that other ranks have are
        # zero here: with fewer rows, a matrix product may round differently.
        for first in range(self.shard.first // self.tile * self.tile, self.shard.last, self.tile):
            begin, end = max(first, self.shard.first), min(first + self.tile, self.shard.last)
            mine = slice(begin - self.shard.first, end - self.shard.first)
            if end - begin < self.tile:
                tile.zero_()
            torch.div(self.x[mine].float(), self.norms[mine], out=tile[begin - first : end - first])
            new = make_keys(x @ tile.T, first)
            new[:, : begin - first] = NOTHING
            new[:, end - first :] = NOTHING
            keys = torch.cat([keys, new], 1).topk(k, sorted=False).values
        if not self.shard.rows:
            return keys, torch.zeros_like(keys)
        position = (LOW - (keys & LOW) - self.shard.first).clamp(0, self.shard.rows - 1)
        return keys, self.y[position]


def make_keys(similarity: Tensor, first: int) -> Tensor:
    """Return the keys (n, m) of m features, whose positions begin at `first`, from their similarities (n, m)."""
    bits = similarity.view(torch.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers that sort as the similarities do
    positions = torch.arange(first, first + similarity.shape[1], device=similarity.device)
    return bits.long().bitwise_left_shift_(32).bitwise_or_(LOW - positions)


def cosines(keys: Tensor) -> Tensor:
    """Return the similarities that are stored in keys."""
    bits = (keys >> 32).int()
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).view(torch.float32)


def merge(keys: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys (n, k) of the nearest features of all ranks, nearest first, and their labels.

    `keys` and `labels` (n, k) are those of this rank."""
    n, k = keys.shape
    if dist.size() > 1:
        parts = dist.gather_together([keys, labels], [n] * dist.size())  # (ranks * n, k)
        keys, labels = (part.view(-1, n, k).transpose(0, 1).reshape(n, -1) for part in parts)
    top = keys.topk(k)
    return top.values, labels.gather(1, top.indices)


def count_hits(
    cosine: Tensor, labels: Tensor, truth: Tensor, *, classes: int, ks: Sequence[int], temperature: float
) -> Tensor:
    """Return how many of n images are classified right by one guess and by five, for each k in `ks`: (len(ks), 2).

    `cosine` and `labels` (n, k) are of the neighbours, nearest first; `truth` (n,) are the images' classes."""
    counts = []
    for k in ks:
        votes = class_votes(cosine[:, :k], labels[:, :k], classes=classes, temperature=temperature)
        # As in DINO's code, top-5 is top-k if k is below 5. Classes without a vote come last, in ascending order.
        top = votes.sort(dim=1, descending=True, stable=True).indices[:, : min(5, k)]
        right = top == truth.unsqueeze(1)
        counts += [right[:, :1].any(1).sum(), right.any(1).sum()]
    return torch.stack(counts).view(len(ks), 2)


def vote(cosine: Tensor, labels: Tensor, *, classes: int, k: int, temperature: float) -> Tensor:
    """Return the votes (n, C) of the k nearest neighbours of n queries.

    `cosine` (n, m) is the similarity of the queries to m training features, whose classes are `labels` (m,). Each of
    the k nearest adds exp(cosine / temperature) to the votes of its class."""
    near = cosine.topk(min(k, len(labels)), dim=1)
    return class_votes(near.values, labels[near.indices], classes=classes, temperature=temperature)


def class_votes(cosine: Tensor, labels: Tensor, *, classes: int, temperature: float) -> Tensor:
    """Sum the weights exp(cosine / temperature) of k neighbours by class.

    The cosines and labels of the neighbours of n queries are (n, k), and the sums are (n, C). If the largest weight of
    a query would exceed e^64, all weights of the query are divided by the same number."""
    exponents = cosine / temperature
    # Below a temperature of 0.0113 the largest weights would be infinite, so that classes tie.
    exponents -= (exponents.amax(1, keepdim=True) - LARGEST).clamp_min(0)
    votes = torch.zeros(len(cosine), classes, device=cosine.device)
    return votes.scatter_add_(1, labels, exponents.exp())
