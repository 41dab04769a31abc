"""VICReg: Bardes, Ponce and LeCun 2022, arXiv:2105.04906, algorithm 1."""

import torch
import torch.nn.functional as F
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor

from eagleray.base import dist
from eagleray.config.schedule import Progress
from eagleray.data.batch import Batch
from eagleray.methods.method import Method
from eagleray.models.backbone import Backbone, Encoder
from eagleray.models.heads import mlp


class VICReg(Method):
    """Two views drawn together while the channels of each keep their variance and lose their covariance."""

    views = (2, 2)

    def __init__(
        self,
        backbone: Backbone,
        *,
        dim: PositiveInt = 8192,
        hidden: PositiveInt = 8192,
        # Weights as in the authors' code, which the published numbers come from: it has means over channels and over
        # views where the paper's equations 5 and 6 have sums.
        invariance: PositiveFloat = 25.0,
        variance: PositiveFloat = 25.0,
        covariance: PositiveFloat = 1.0,
    ) -> None:
        super().__init__()
        self.invariance, self.variance, self.covariance = invariance, variance, covariance
        self.encoder = Encoder(backbone, mlp([backbone.dim, hidden, hidden, dim], norm=True))

    def forward(self, batch: Batch, at: Progress) -> dict[str, Tensor]:
        x1, x2 = batch.views
        # One forward per view: batch norm must not mix the two.
        z1, z2 = self.encoder([x1]), self.encoder([x2])  # (B, C)
        s, v, c = terms(z1, z2, batch.rows)
        return {"loss": self.invariance * s + self.variance * v + self.covariance * c}

    def export(self) -> Backbone:
        return self.encoder.backbone


@torch.autocast("cuda", enabled=False)  # near 1, where the deviations go, bfloat16 has steps of 1/256
def terms(z1: Tensor, z2: Tensor, rows: tuple[int, ...], eps: float = 1e-4) -> tuple[Tensor, Tensor, Tensor]:
    """Equations 5, 1 and 4 (invariance, variance, covariance) for embeddings (B, C), over the N rows of all ranks: the
    same on every rank. `eps` is added to the variances."""
    z1, z2 = dist.gather_with_grad(z1.float(), rows), dist.gather_with_grad(z2.float(), rows)  # (N, C)
    s = F.mse_loss(z1, z2)
    v = (variance_hinge(z1, eps) + variance_hinge(z2, eps)) / 2
    c = covariance_penalty(z1) + covariance_penalty(z2)
    return s, v, c


def variance_hinge(z: Tensor, eps: float) -> Tensor:
    """How far the standard deviations of the channels of z (N, C) stay below 1; the mean over channels."""
    return F.relu(1 - torch.sqrt(z.var(0) + eps)).mean()


def covariance_penalty(z: Tensor) -> Tensor:
    """Squared covariances of every two channels of z (N, C), summed and divided by C."""
    z = z - z.mean(0)
    cov = z.T @ z / (len(z) - 1)  # (C, C)
    return (cov.square().sum() - cov.diagonal().square().sum()) / z.shape[1]
