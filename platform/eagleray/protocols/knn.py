"""Classify frozen features by the weighted votes of their k nearest neighbours: Wu et al. 2018 (InstDisc),
arXiv:1805.01978, with the settings of DINO's protocol.

Each rank searches its own training features, and then the neighbours found by all ranks are merged. The neighbours are
the same on any number of ranks, to the last bit: all matrix products have the same shapes, and equal similarities are
ordered by the position of the training feature."""

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
VOTERS = 256  # test images whose votes for all classes are computed at a time, to save memory
LARGEST = 64.0  # largest exponent of a weight: float32 overflows above e^88, and k weights are added
NOTHING = torch.iinfo(torch.int64).min  # key that stands for no feature; it is smaller than any real key
LOW = 2**32 - 1  # mask of the bits of a key that hold the position


def knn(
    train: LabelledFeatures,
    test: LabelledFeatures,
    *,
    k: int = Evaluate.k,
    ks: Sequence[int] = (),
    temperature: float = Evaluate.temperature,
) -> dict[str, float]:
    """Measure top-1 and top-5 accuracy in percent with k neighbours, and top-1 also for each k in `ks`.

    `train` and `test` are the features of this rank. Called by all ranks together."""
    accuracy = accuracies(train, test, ks=sorted({k, *ks}), temperature=temperature)
    return {"knn/top1": accuracy[k][0], "knn/top5": accuracy[k][1]} | {f"knn/top1_k{n}": accuracy[n][0] for n in ks}


def accuracies(
    train: LabelledFeatures, test: LabelledFeatures, *, ks: Sequence[int], temperature: float
) -> dict[int, tuple[float, float]]:
    """Return top-1 and top-5 accuracy in percent by number of neighbours, for each in `ks`, from a single search.

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
    """The training features of this rank, among which neighbours are searched.

    A neighbour is represented by a key of 64 bits. The upper half is its similarity. The lower half is its position
    among the features of all ranks, counted down. So all keys differ, and a larger key is a nearer neighbour."""

    def __init__(self, train: LabelledFeatures) -> None:
        """`train` are the features of this rank. Called by all ranks together."""
        self.x, self.y, self.shard = *train, Shard.of(len(train.x))
        self.tile = min(TILE, -(-self.shard.total // 64) * 64)
        parts = [part.float().norm(dim=1, keepdim=True) for part in self.x.split(TILE)]
        self.norms = torch.cat(parts).clamp_min(1e-12)  # the smallest norm that F.normalize divides by

    def nearest(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the keys (n, k) and labels (n, k) of this rank's k features nearest to each unit query x (n, D). The k
        features are in any order."""
        keys = torch.full((len(x), k), NOTHING, device=x.device)
        tile = x.new_empty(self.tile, x.shape[1])
        # Tiles begin at multiples of their size in the table of all ranks. Rows of other ranks are filled with zeros,
        # because a matrix product with fewer rows may round differently.
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
    """Return the keys (n, m) of m features from their similarities (n, m). `first` is the first feature's position."""
    bits = similarity.view(torch.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers that have the order of the similarities
    positions = torch.arange(first, first + similarity.shape[1], device=similarity.device)
    return bits.long().bitwise_left_shift_(32).bitwise_or_(LOW - positions)


def cosines(keys: Tensor) -> Tensor:
    """Return the similarities that are stored in keys."""
    bits = (keys >> 32).int()
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).view(torch.float32)


def merge(keys: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys (n, k) and labels (n, k) of the nearest features of all ranks, nearest first, from those of this
    rank."""
    n, k = keys.shape
    if dist.size() > 1:
        parts = dist.gather_together([keys, labels], [n] * dist.size())  # (ranks * n, k)
        keys, labels = (part.view(-1, n, k).transpose(0, 1).reshape(n, -1) for part in parts)
    top = keys.topk(k)
    return top.values, labels.gather(1, top.indices)


def count_hits(
    cosine: Tensor, labels: Tensor, truth: Tensor, *, classes: int, ks: Sequence[int], temperature: float
) -> Tensor:
    """Return for how many of n images the true class gets the most votes, or is among the first five: (len(ks), 2).

    `cosine` and `labels` (n, k) are those of the neighbours, nearest first; `truth` (n,) are the true classes."""
    counts = []
    for k in ks:
        votes = class_votes(cosine[:, :k], labels[:, :k], classes=classes, temperature=temperature)
        # As in DINO's code, top-5 is top-k for k below 5. Classes without votes come last, in ascending order.
        top = votes.sort(dim=1, descending=True, stable=True).indices[:, : min(5, k)]
        right = top == truth.unsqueeze(1)
        counts += [right[:, :1].any(1).sum(), right.any(1).sum()]
    return torch.stack(counts).view(len(ks), 2)


def vote(cosine: Tensor, labels: Tensor, *, classes: int, k: int, temperature: float) -> Tensor:
    """Return the votes (n, C) of the k nearest neighbours of n queries.

    `cosine` (n, m) are the queries' similarities to m training features, whose classes are `labels` (m,). Each
    neighbour adds exp(cosine / temperature) to the votes of its class."""
    near = cosine.topk(min(k, len(labels)), dim=1)
    return class_votes(near.values, labels[near.indices], classes=classes, temperature=temperature)


def class_votes(cosine: Tensor, labels: Tensor, *, classes: int, temperature: float) -> Tensor:
    """Return the votes (n, C): the sum of the weights exp(cosine / temperature) of each query's k neighbours, by class.

    `cosine` and `labels` (n, k) are those of the neighbours. If a query's largest weight would exceed e^64, all its
    weights are divided by the same number."""
    exponents = cosine / temperature
    # Below a temperature of 0.0113 the largest weights would be infinite, and their classes would tie.
    exponents -= (exponents.amax(1, keepdim=True) - LARGEST).clamp_min(0)
    votes = torch.zeros(len(cosine), classes, device=cosine.device)
    return votes.scatter_add_(1, labels, exponents.exp())
