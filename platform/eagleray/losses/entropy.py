"""Entropy of probabilities over K classes, as a share of the largest possible entropy, ln K."""

import math

import torch
from torch import Tensor


def entropy(p: Tensor) -> Tensor:
    """Return the mean entropy of the rows of p (B, K), which sum to one each: 1 if every row is uniform."""
    return -torch.xlogy(p.detach(), p.detach()).sum(-1).mean() / math.log(p.shape[-1])


def usage(p: Tensor) -> Tensor:
    """Return the entropy of the mean row of p (B, K): 0 if every row has probability 1 for the same class."""
    return entropy(p.detach().mean(0, keepdim=True))
