"""Entropy of probabilities over K classes, as a share of the largest possible entropy, ln K."""

import math

import torch
from torch import Tensor


def entropy(p: Tensor) -> Tensor:
    """Return the mean entropy of the rows of p (B, K), which sum to one: 1 where every row is uniform."""
    return -torch.xlogy(p.detach(), p.detach()).sum(-1).mean() / math.log(p.shape[-1])


def usage(p: Tensor) -> Tensor:
    """Return the entropy of the mean row of p (B, K): 0 where all rows choose the same class with certainty."""
    return entropy(p.detach().mean(0, keepdim=True))
