"""VICReg makes two views agree while channels keep their variance and lose covariance (Bardes et al. 2022,
arXiv:2105.04906, algorithm 1).

B images on this rank, N on all ranks, C channels."""

import torch
import torch.nn.functional as F
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor

from eagleray.base import dist
from eagleray.base.autocast import in_float32
from eagleray.config.schedule import Progress
from eagleray.data.batch import Batch
from eagleray.methods.method import Method
from eagleray.models.backbone import Backbone, Encoder
from eagleray.models.heads import mlp


class VICReg(Method):
    """Both views pass through one encoder, and the three terms of the loss are computed over the batch of all ranks."""

    views = (2, 2)
    pooled_only = True

    def __init__(
        self,
        backbone: Backbone,
        *,
        dim: PositiveInt = 8192,
        hidden: PositiveInt = 8192,
        # The weights fit the authors' code, which the published numbers come from: it takes means over channels and
        # views where equations 5 and 6 of the paper have sums.
        invariance: PositiveFloat = 25.0,
        variance: PositiveFloat = 25.0,
        covariance: PositiveFloat = 1.0,
    ) -> None:
        super().__init__()
        self.invariance, self.variance, self.covariance = invariance, variance, covariance
        self.encoder = Encoder(backbone, mlp([backbone.dim, hidden, hidden, dim], norm=True))

    def forward(self, batch: Batch, at: Progress) -> dict[str, Tensor]:
        z1, z2 = self.encoder.each(batch.views)  # (B, C)
        s, v, c = terms(z1, z2, batch.rows)
        return {"loss": self.invariance * s + self.variance * v + self.covariance * c}

    def export(self) -> Backbone:
        return self.encoder.backbone


@in_float32  # the standard deviations approach 1, where bfloat16 has steps of 1/256
def terms(z1: Tensor, z2: Tensor, rows: tuple[int, ...], eps: float = 1e-4) -> tuple[Tensor, Tensor, Tensor]:
    """Return invariance, variance and covariance (equations 5, 1 and 4) of embeddings (B, C), the same on every rank.

    Each term is computed over the N rows of all ranks. `eps` is added to the variances."""
    z1, z2 = dist.gather_with_grad(z1, rows), dist.gather_with_grad(z2, rows)  # (N, C)
    s = F.mse_loss(z1, z2)
    v = (variance_hinge(z1, eps) + variance_hinge(z2, eps)) / 2
    c = covariance_penalty(z1) + covariance_penalty(z2)
    return s, v, c


def variance_hinge(z: Tensor, eps: float) -> Tensor:
    """Return how far the standard deviation of a channel of z (N, C) is below 1, as a mean over channels."""
    return F.relu(1 - torch.sqrt(z.var(0) + eps)).mean()


def covariance_penalty(z: Tensor) -> Tensor:
    """Return the sum of the squared covariances of all pairs of different channels of z (N, C), divided by C.

    z is the same on all ranks; each rank computes the covariances of its share of the channels with all channels."""
    z = z - z.mean(0)
    own = range(z.shape[1])[dist.rank() :: dist.size()]
    cov = z[:, own.start :: own.step].T @ z / (len(z) - 1)  # (C / ranks, C)
    diagonal = cov[:, own.start :: own.step].diagonal()
    return dist.total_with_grad(cov.square().sum() - diagonal.square().sum()) / z.shape[1]
