"""InfoNCE contrasts a query's own key with the keys of a queue (MoCo: He et al. 2019, arXiv:1911.05722, equation 1)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from eagleray.losses.products import inner


def logits(q: Tensor, k: Tensor, negatives: Tensor, tau: float) -> Tensor:
    """Return logits (B, 1 + K) of unit queries q (B, C): their cosines divided by tau, in column 0 with their own unit
    keys k (B, C), in the other columns with the unit keys `negatives` (C, K)."""
    # The negatives are copied, because the queue is overwritten before the gradient is computed.
    return torch.cat([(q * k).sum(1, keepdim=True), inner(q, negatives.clone().T)], 1) / tau


def infonce(scores: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits (B, 1 + K) whose column 0 is the positive."""
    return F.cross_entropy(scores, scores.new_zeros(len(scores), dtype=torch.long))
