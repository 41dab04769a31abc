"""How far probabilities are spread, as shares of the largest possible entropy, ln K."""

import math

import torch
from torch import Tensor


def entropy(p: Tensor) -> Tensor:
    """Mean over rows of the entropy of p (B, K), whose rows sum to one: 1 where every row is uniform."""
    return -torch.xlogy(p.detach(), p.detach()).sum(-1).mean() / math.log(p.shape[-1])


def usage(p: Tensor) -> Tensor:
    """Entropy of the mean row of p (B, K): 0 where all rows agree on one of the K."""
    return entropy(p.detach().mean(0, keepdim=True))
