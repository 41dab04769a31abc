"""SIGReg pulls the distribution of embeddings towards an isotropic Gaussian (Balestriero and LeCun 2025,
arXiv:2511.08544, definition 2 and algorithm 1).

V views, B images on this rank, N on all ranks, C channels, M directions."""

import torch
from torch import Tensor

from eagleray.base import dist
from eagleray.base.autocast import in_float32
from eagleray.base.rng import step_generator

KNOTS = 17  # points at which the integrand is computed, as section 6.1 recommends


def directions(dim: int, count: int, seed: int, device: torch.device) -> Tensor:
    """Draw M unit vectors (C, M) uniformly on the sphere, anew in each step and the same on every rank."""
    a = torch.randn(dim, count, generator=step_generator(seed, device), device=device)
    return a / a.norm(dim=0)


@in_float32  # the arguments of the cosines exceed 2, where bfloat16 has steps of 1/64
def sigreg(z: Tensor, a: Tensor, rows: tuple[int, ...], *, reach: float = 3.0) -> Tensor:
    """Return the mean over views and directions a (C, M) of the Epps-Pulley statistic of embeddings z (V, B, C).

    It is computed over the N rows of all ranks, so it is the same on every rank."""
    return epps_pulley(z @ a.to(z.dtype), rows, reach=reach).mean()


def epps_pulley(x: Tensor, rows: tuple[int, ...], *, reach: float) -> Tensor:
    """Return how far samples x (V, B, M) are from a standard normal distribution, for each view and direction (V, M).

    It is N times the integral from -reach to reach of |ecf(t) - exp(-t^2 / 2)|^2 exp(-t^2 / 2), where the empirical
    characteristic function ecf(t) is the mean of exp(itx) over the N rows of all ranks (Epps and Pulley 1983)."""
    n = sum(rows)
    t = torch.linspace(0, reach, KNOTS, device=x.device, dtype=x.dtype)  # (T,); from 0, as the integrand is even
    phi = torch.exp(-t.square() / 2)
    tx = x.unsqueeze(-1) * t  # (V, B, M, T)
    real, imaginary = dist.total_of_same_loss(torch.stack([tx.cos().sum(1), tx.sin().sum(1)]), rows) / n
    away = (real - phi).square() + imaginary.square()
    return 2 * n * torch.trapezoid(away * phi, dx=reach / (KNOTS - 1))
