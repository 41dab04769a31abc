"""Sinkhorn-Knopp computes soft assignments that use every prototype equally (SwAV; Cuturi 2013, arXiv:1306.0895)."""

import math

import torch
from torch import Tensor

from eagleray.base import dist
from eagleray.losses.prototypes import Scores, score_chunks


@torch.no_grad()
def sinkhorn(scores: Tensor, epsilon: float, iterations: int) -> Tensor:
    """Return assignments q (B, K) of rows to K prototypes from scores (B, K); the rows of q sum to one.

    Prototypes are balanced over the rows of all ranks, which may have different numbers of rows. A smaller `epsilon`
    makes assignments sharper and needs more `iterations`."""
    # Logarithms are used, because exp(score / epsilon) overflows or leaves a row of zeros where epsilon is small.
    # Constant factors, such as 1 / K and 1 / B, are left out: the next normalisation would cancel them.
    log_q = scores.float() / epsilon
    for _ in range(iterations):
        own = log_q.logsumexp(0, keepdim=True)  # (1, K)
        log_q = log_q - dist.gather(own, (1,) * dist.size()).logsumexp(0)  # the same mass for every prototype
        log_q = log_q - log_q.logsumexp(1, keepdim=True)  # the same mass for every sample
    return log_q.exp()


@torch.no_grad()
def sinkhorn_center(t: Scores, epsilon: float, iterations: int) -> Tensor:
    """Return the centre c (K,) with which softmax((t - c) / epsilon) are the assignments of `sinkhorn` for scores t.

    Only a few rows of scores are in memory at once. Ranks may have different numbers of rows, or none."""
    u = torch.zeros(len(t.w), device=t.z.device)  # c / epsilon, changed until all prototypes have the same mass
    for i in range(iterations):
        own = torch.full_like(u, -math.inf)
        for x in score_chunks(t, epsilon):  # (R, K)
            if i:
                x -= (x - u).logsumexp(1, keepdim=True)  # the same mass for every row
            own = torch.logaddexp(own, x.logsumexp(0))
        u = dist.gather(own.unsqueeze(0), (1,) * dist.size()).logsumexp(0)
        u = u.where(u > -math.inf, 0)  # if no rank has a row, u is -inf
    return epsilon * u
