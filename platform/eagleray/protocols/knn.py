"""Weighted k-nearest-neighbour classification of frozen features: Wu et al. 2018 (InstDisc), as in DINO's protocol."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor

from eagleray.protocols.features import Labelled
from eagleray.protocols.outcome import Outcome

CHUNK = 1024  # test images at a time


def neighbours(
    train: Labelled,
    test: Labelled,
    *,
    k: PositiveInt = 20,
    ks: tuple[PositiveInt, ...] = (10, 20, 100, 200),
    temperature: PositiveFloat = 0.07,
) -> Outcome:
    """Top-1 and top-5 in percent for k neighbours, and top-1 for each of `ks`: DINO looks at four."""
    found = accuracies(train, test, ks=sorted({k, *ks}), temperature=temperature)
    numbers = {"knn/top1": found[k][0], "knn/top5": found[k][1]} | {f"knn/top1_k{n}": found[n][0] for n in ks}
    return Outcome(numbers, {"k": k, "ks": list(ks), "temperature": temperature})


def knn(train: Labelled, test: Labelled, *, k: int, temperature: float) -> dict[str, float]:
    """Top-1 and top-5 accuracy in percent."""
    top1, top5 = accuracies(train, test, ks=[k], temperature=temperature)[k]
    return {"knn/top1": top1, "knn/top5": top5}


def accuracies(
    train: Labelled, test: Labelled, *, ks: Sequence[int], temperature: float
) -> dict[int, tuple[float, float]]:
    """The same for several k; the nearest are looked for once."""
    classes = int(max(train.y.max(), test.y.max())) + 1
    x, bank = F.normalize(test.x, dim=1), F.normalize(train.x, dim=1)
    hits = {k: [0, 0] for k in ks}
    for rows in torch.arange(len(x)).split(CHUNK):
        near = (x[rows] @ bank.T).topk(min(max(ks), len(bank)), dim=1)
        for k in ks:
            votes = counted(near.values[:, :k], train.y[near.indices[:, :k]], classes=classes, temperature=temperature)
            # As DINO's: k < 5 narrows top-5, which classes without a vote fill up, the first ones first.
            top = votes.sort(dim=1, descending=True, stable=True).indices[:, : min(5, k)]
            right = top == test.y[rows].unsqueeze(1)
            hits[k] = [hit + int(right[:, :n].any(1).sum()) for hit, n in zip(hits[k], (1, 5), strict=True)]
    return {k: (100 * one / len(x), 100 * five / len(x)) for k, (one, five) in hits.items()}


def scores(x: Tensor, bank: Tensor, labels: Tensor, *, classes: int, k: int, temperature: float) -> Tensor:
    """Votes (n, C) for unit features x (n, D) from the rows of a bank (m, D)."""
    return vote(x @ bank.T, labels, classes=classes, k=k, temperature=temperature)


def vote(cosine: Tensor, labels: Tensor, *, classes: int, k: int, temperature: float) -> Tensor:
    """Votes (n, C): each of the k nearest rows of the bank, by their cosines (n, m), adds exp(cosine / T) to its
    class."""
    near = cosine.topk(min(k, len(labels)), dim=1)
    return counted(near.values, labels[near.indices], classes=classes, temperature=temperature)


def counted(cosine: Tensor, labels: Tensor, *, classes: int, temperature: float) -> Tensor:
    """Votes (n, C) of neighbours with these cosines (n, k) and labels (n, k)."""
    votes = torch.zeros(len(cosine), classes, device=cosine.device)
    return votes.scatter_add_(1, labels, (cosine / temperature).exp())
