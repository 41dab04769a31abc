"""Weighted k-nearest-neighbour classification of frozen features: Wu et al. 2018 (InstDisc), as in DINO's protocol."""

import torch
import torch.nn.functional as F
from torch import Tensor

from eagleray.evals.features import Labelled

CHUNK = 1024  # test images at a time


def knn(train: Labelled, test: Labelled, *, k: int, temperature: float) -> dict[str, float]:
    """Top-1 and top-5 accuracy in percent."""
    classes = int(max(train.y.max(), test.y.max())) + 1
    x, bank = F.normalize(test.x, dim=1), F.normalize(train.x, dim=1)
    hits = {1: 0, 5: 0}
    for rows in torch.arange(len(x)).split(CHUNK):
        votes = scores(x[rows], bank, train.y, classes=classes, k=k, temperature=temperature)
        # As DINO's: k < 5 narrows top-5, which classes without a vote fill up, the first ones first.
        top = votes.sort(dim=1, descending=True, stable=True).indices[:, : min(5, k)]
        right = top == test.y[rows].unsqueeze(1)
        for n in hits:
            hits[n] += int(right[:, :n].any(1).sum())
    return {f"knn/top{n}": 100 * hit / len(x) for n, hit in hits.items()}


def scores(x: Tensor, bank: Tensor, labels: Tensor, *, classes: int, k: int, temperature: float) -> Tensor:
    """Votes (n, C) for unit features x (n, D) from the rows of a bank (m, D)."""
    return vote(x @ bank.T, labels, classes=classes, k=k, temperature=temperature)


def vote(cosine: Tensor, labels: Tensor, *, classes: int, k: int, temperature: float) -> Tensor:
    """Votes (n, C): each of the k nearest rows of the bank, by their cosines (n, m), adds exp(cosine / T) to its
    class."""
    near = cosine.topk(min(k, len(labels)), dim=1)
    return torch.zeros(len(cosine), classes, device=cosine.device).scatter_add_(
        1, labels[near.indices], (near.values / temperature).exp()
    )
