"""A query's own key against the keys of a queue: InfoNCE as in MoCo, He et al. 2019, arXiv:1911.05722, equation 1."""

import torch
import torch.nn.functional as F
from torch import Tensor


def logits(q: Tensor, k: Tensor, negatives: Tensor, tau: float) -> Tensor:
    """Unit queries (B, C) times their own unit keys (B, C), then times negatives (C, K): (B, 1 + K)."""
    # A copy, as the queue is written before the gradient is taken.
    return torch.cat([(q * k).sum(1, keepdim=True), q @ negatives.clone()], 1) / tau


def infonce(scores: Tensor) -> Tensor:
    """Mean cross-entropy of logits (B, 1 + K) whose column 0 is the positive."""
    return F.cross_entropy(scores, scores.new_zeros(len(scores), dtype=torch.long))
