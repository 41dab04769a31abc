"""Measure how features are spread, without labels. All results stay on the device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from eagleray.base.shards import local, norms, sharded


def spread(z: Tensor) -> Tensor:
    """Return sqrt(C) times the standard deviation of unit rows z (B, C) over the batch, averaged over the channels.
    It is 1 where directions are random and 0 where all rows are equal (Chen and He 2021, arXiv:2011.10566, section
    4.1)."""
    return z.std(0, correction=0).mean() * z.shape[1] ** 0.5


def effective_rank(z: Tensor) -> Tensor:
    """Return RankMe (Garrido et al. 2023, arXiv:2210.02885): the exp of the entropy of the singular values of z (B,
    C), from 1 to min(B, C)."""
    p = torch.linalg.svdvals(z)
    p = p / p.sum().clamp(min=torch.finfo(p.dtype).tiny)  # 1 where all features are zero
    return torch.exp(-torch.xlogy(p, p).sum())


def alignment(z1: Tensor, z2: Tensor) -> Tensor:
    """Return the mean squared distance between unit rows z1 and z2 (B, C) of the same images (Wang and Isola 2020,
    arXiv:2005.10242)."""
    return (z1 - z2).square().sum(1).mean()


def uniformity(z: Tensor) -> Tensor:
    """Return the log of the mean of exp(-2 |zi - zj|^2) over pairs of unit rows (B, C): 0 where all rows are equal,
    near -4 where they cover the sphere (Wang and Isola 2020, arXiv:2005.10242)."""
    return torch.pdist(z).square().mul(-2).exp().mean().log()


def input_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of pixels (B, 3, H, W): about 0 and 1 where images are normalised."""
    std, mean = torch.std_mean(x.float())
    return mean, std


def distance(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """Return |a - b| / |b| for two lists of tensors, each taken as one vector."""
    return size(torch._foreach_sub(local(a), local(b)), split=sharded(b[0])) / size(b)


def size(tensors: Sequence[Tensor], *, split: bool | None = None) -> Tensor:
    """Return the norm of a list of tensors, taken as one vector. `split` is explained at `norms`."""
    return torch.linalg.vector_norm(norms(tensors, split=split))
