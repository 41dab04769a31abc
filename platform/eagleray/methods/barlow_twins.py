"""Barlow Twins drives the cross-correlation of two views' channels towards the identity matrix (Zbontar et al. 2021,
arXiv:2103.03230, algorithm 1).

B images on this rank, N on all ranks, C channels."""

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor

from eagleray.base import dist
from eagleray.base.autocast import in_float32
from eagleray.config.schedule import Progress
from eagleray.data.batch import Batch
from eagleray.methods.method import Method
from eagleray.models.backbone import Backbone, Encoder
from eagleray.models.heads import mlp


class BarlowTwins(Method):
    """Both views pass through one encoder, and the loss is computed over the batch of all ranks."""

    views = (2, 2)
    pooled_only = True

    def __init__(
        self,
        backbone: Backbone,
        *,
        dim: PositiveInt = 8192,
        hidden: PositiveInt = 8192,
        off_diagonal: PositiveFloat = 0.0051,  # weight lambda, as in the authors' code; the paper rounds it to 0.005
    ) -> None:
        super().__init__()
        self.off_diagonal = off_diagonal
        self.encoder = Encoder(backbone, mlp([backbone.dim, hidden, hidden, dim], norm=True))

    def forward(self, batch: Batch, at: Progress) -> dict[str, Tensor]:
        z1, z2 = self.encoder.each(batch.views)  # (B, C)
        return {"loss": barlow(z1, z2, self.off_diagonal, batch.rows)}

    def export(self) -> Backbone:
        return self.encoder.backbone


@in_float32  # the diagonal approaches 1, where bfloat16 has steps of 1/256
def barlow(z1: Tensor, z2: Tensor, lambd: float, rows: tuple[int, ...], eps: float = 1e-5) -> Tensor:
    """Return the loss, equation 1, of projections z1 and z2 (B, C) over all ranks' N rows, the same on every rank.

    `lambd` weights the off-diagonal terms, and `eps` is added to the variances."""
    n = sum(rows)
    z1, z2 = standardise(z1, n, eps), standardise(z2, n, eps)
    c = dist.total_of_same_loss(z1.T @ z2, rows) / n  # (C, C)
    on = (1 - c.diagonal()).square().sum()
    off = c.square().sum() - c.diagonal().square().sum()
    return on + lambd * off


def standardise(z: Tensor, n: int, eps: float) -> Tensor:
    """Scale the channels of z (B, C) to mean 0 and variance 1 over the n rows of all ranks."""
    z = z - dist.total_with_grad(z.sum(0)) / n
    var = dist.total_with_grad(z.square().sum(0)) / n
    return z * torch.rsqrt(var + eps)
