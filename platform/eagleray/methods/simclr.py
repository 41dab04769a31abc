"""SimCLR contrasts two crops of an image with all other crops of the batch (Chen et al. 2020, arXiv:2002.05709,
algorithm 1).

B images on this rank, N on all ranks, C channels."""

import math

import torch
import torch.nn.functional as F
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor

from eagleray.base import dist
from eagleray.config.schedule import Progress
from eagleray.data.batch import Batch
from eagleray.losses.products import inner, unit
from eagleray.methods.method import Method
from eagleray.models.backbone import Backbone, Encoder
from eagleray.models.heads import mlp


class SimCLR(Method):
    """A crop's negatives are the crops of all other images on all ranks. There is no momentum encoder or predictor."""

    views = (2, 2)
    pooled_only = True

    def __init__(
        self,
        backbone: Backbone,
        *,
        dim: PositiveInt = 128,
        hidden: PositiveInt = 2048,
        layers: PositiveInt = 2,  # linear layers in the projector
        temperature: PositiveFloat = 0.1,
    ) -> None:
        super().__init__()
        self.temperature = temperature
        widths = [backbone.dim] + [hidden] * (layers - 1) + [dim]
        # The paper's projector has no batch norm; the authors' code, the source of its numbers, has it in all layers.
        self.encoder = Encoder(backbone, mlp(widths, norm=True, last_norm=True))

    def forward(self, batch: Batch, at: Progress) -> dict[str, Tensor]:
        # Both views share a forward pass, as in the authors' code: batch norm in the projector sees all crops together.
        z1, z2 = self.encoder(batch.views).chunk(2)  # (B, C)
        loss = nt_xent(z1, z2, self.temperature, batch.rows)
        return {"loss": loss, "gain": math.log(2 * sum(batch.rows) - 1) - loss}

    def export(self) -> Backbone:
        return self.encoder.backbone


def nt_xent(z1: Tensor, z2: Tensor, tau: float, rows: tuple[int, ...]) -> Tensor:
    """Return the mean of equation 1 over the crops z1 and z2 (B, C), each contrasted with all other 2N - 1 crops."""
    z1, z2 = unit(z1), unit(z2)
    # Gradients pass through the gathering, because a crop also learns as a negative of other ranks' crops.
    others = torch.cat([dist.gather_with_grad(z1, rows), dist.gather_with_grad(z2, rows)])  # (2N, C)
    n = sum(rows)
    i = torch.arange(len(z1), device=z1.device) + dist.offset(rows)
    own, positive = torch.cat([i, i + n]), torch.cat([i + n, i])  # (2B,)
    logits = inner(torch.cat([z1, z2]), others) / tau  # (2B, 2N)
    logits = logits.scatter(1, own.unsqueeze(1), -math.inf)
    return F.cross_entropy(logits, positive)
