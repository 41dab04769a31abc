"""Classify frozen features by the weighted votes of their k nearest neighbours: Wu et al. 2018 (InstDisc),
arXiv:1805.01978, with the settings of DINO's protocol."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor

from eagleray.protocols.features import LabelledFeatures
from eagleray.protocols.outcome import Outcome

CHUNK = 1024  # test images whose similarities are in memory at a time


def knn(
    train: LabelledFeatures,
    test: LabelledFeatures,
    *,
    k: PositiveInt = 20,
    ks: tuple[PositiveInt, ...] = (10, 20, 100, 200),
    temperature: PositiveFloat = 0.07,
) -> Outcome:
    """Measure top-1 and top-5 accuracy in percent with k neighbours, and top-1 accuracy for each number of neighbours
    in `ks`.

    The default `ks` are the numbers of neighbours that DINO reports."""
    accuracy = accuracies(train, test, ks=sorted({k, *ks}), temperature=temperature)
    numbers = {"knn/top1": accuracy[k][0], "knn/top5": accuracy[k][1]} | {f"knn/top1_k{n}": accuracy[n][0] for n in ks}
    return Outcome(numbers, {"k": k, "ks": list(ks), "temperature": temperature})


def accuracies(
    train: LabelledFeatures, test: LabelledFeatures, *, ks: Sequence[int], temperature: float
) -> dict[int, tuple[float, float]]:
    """Return top-1 and top-5 accuracy in percent for each number of neighbours in `ks`, searching for neighbours only
    once."""
    classes = int(max(train.y.max(), test.y.max())) + 1
    x, bank = F.normalize(test.x, dim=1), F.normalize(train.x, dim=1)
    hits = {k: [0, 0] for k in ks}
    for rows in torch.arange(len(x)).split(CHUNK):
        near = (x[rows] @ bank.T).topk(min(max(ks), len(bank)), dim=1)
        for k in ks:
            votes = class_votes(
                near.values[:, :k], train.y[near.indices[:, :k]], classes=classes, temperature=temperature
            )
            # As in DINO's code, k < 5 narrows top-5. Classes without a vote fill the rest, in order of their number.
            top = votes.sort(dim=1, descending=True, stable=True).indices[:, : min(5, k)]
            right = top == test.y[rows].unsqueeze(1)
            hits[k] = [hit + int(right[:, :n].any(1).sum()) for hit, n in zip(hits[k], (1, 5), strict=True)]
    return {k: (100 * one / len(x), 100 * five / len(x)) for k, (one, five) in hits.items()}


def vote(cosine: Tensor, labels: Tensor, *, classes: int, k: int, temperature: float) -> Tensor:
    """Return the votes (n, C) of the k nearest neighbours of n queries.

    `cosine` (n, m) is the similarity of the queries to m training features, whose classes are `labels` (m,). Each of
    the k nearest adds exp(cosine / temperature) to the votes of its class."""
    near = cosine.topk(min(k, len(labels)), dim=1)
    return class_votes(near.values, labels[near.indices], classes=classes, temperature=temperature)


def class_votes(cosine: Tensor, labels: Tensor, *, classes: int, temperature: float) -> Tensor:
    """Sum the weights exp(cosine / temperature) of k neighbours by class.

    The cosines and labels of the neighbours of n queries are (n, k), and the sums are (n, C)."""
    votes = torch.zeros(len(cosine), classes, device=cosine.device)
    return votes.scatter_add_(1, labels, (cosine / temperature).exp())
