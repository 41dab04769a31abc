"""Noise-contrastive estimation against the vectors of a memory bank (InstDisc: Wu et al. 2018, arXiv:1805.01978).

B images on this rank, n images in the training set, K negatives, C channels."""

import torch
from torch import Tensor

from eagleray.base import dist
from eagleray.base.autocast import in_float32


@in_float32  # division by the temperature 0.07 enlarges a rounding error 14 times
def exp_similarity(v: Tensor, w: Tensor, tau: float) -> Tensor:
    """Return exp(v . w / tau) (B, 1 + K) for v (B, C) and the bank's rows w (B, 1 + K, C): equation 4 without 1 / Z."""
    return torch.exp(torch.einsum("bc,bkc->bk", v, w) / tau)


def estimate_Z(e: Tensor, n: int, rows: tuple[int, ...]) -> Tensor:
    """Estimate Z by equation 8: the bank's size n times the mean over all ranks of `exp_similarity`, e (B, 1 + K)."""
    return n * dist.total(e.sum()) / (sum(rows) * e.shape[1])


def nce(P: Tensor, n: int) -> Tensor:
    """Return the noise-contrastive loss (equation 7), with noise that is uniform over n images. P (B, 1 + K) are the
    probabilities of the positive, in column 0, and of K negatives."""
    noise = (P.shape[1] - 1) / n
    real, false = P[:, 0], P[:, 1:]
    eps = 1e-7  # the released code has this value
    loss = torch.log(real / (real + noise + eps)) + torch.log(noise / (false + noise + eps)).sum(1)
    return -loss.mean()
