"""Sinkhorn-Knopp: soft assignments that use every prototype equally (Cuturi 2013, arXiv:1306.0895; as in SwAV)."""

import torch
from torch import Tensor

from eagleray.base import dist


@torch.no_grad()
def sinkhorn(scores: Tensor, epsilon: float, iterations: int) -> Tensor:
    """Assignments q (B, K), rows summing to one, of scores (B, K) to K prototypes; over the rows of all ranks, of which
    each may have another number. The smaller epsilon, the sharper they are, and the more iterations it takes."""
    # Of logarithms, as exp(score / epsilon) overflows or leaves a row of zeros where epsilon is small. Masses that are
    # the same for all prototypes or all samples are left out: the next normalisation cancels them.
    log_q = scores.float() / epsilon
    for _ in range(iterations):
        ours = log_q.logsumexp(0, keepdim=True)  # (1, K)
        log_q = log_q - dist.gather(ours, (1,) * dist.size()).logsumexp(0)  # as much for every prototype
        log_q = log_q - log_q.logsumexp(1, keepdim=True)  # as much for every sample
    return log_q.exp()
