"""MoCo v3: Chen, Xie and He 2021, arXiv:2104.02057, algorithm 1."""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn

from eagleray.base import dist
from eagleray.config.schedule import Progress, Schedule
from eagleray.data.batch import Batch
from eagleray.methods.method import Method
from eagleray.models.backbone import Backbone, Encoder
from eagleray.models.ema import ema_copy, ema_update
from eagleray.models.heads import mlp


class MoCoV3(Method):
    """Two views; in-batch keys from every rank, no queue."""

    views = (2, 2)

    def __init__(
        self,
        backbone: Backbone,
        *,
        dim: PositiveInt = 256,
        hidden: PositiveInt = 4096,
        # The authors' code gives a ResNet a projector of two layers and a predictor without norm at its end, where the
        # paper says three layers and norms everywhere; a key, as no backbone's name says which heads are meant.
        heads: Literal["vit", "r50"] = "vit",
        norm: bool = True,  # batch norm in both heads
        predictor: bool = True,
        temperature: PositiveFloat = 0.2,
        momentum: Schedule = Schedule(
            value=0.99, end=1.0
        ),  # the paper says 0.99; the released ViT recipe ramps it to 1
    ) -> None:
        super().__init__()
        self.temperature, self.momentum = temperature, momentum
        vit = heads == "vit"
        widths = [backbone.dim, hidden, hidden, dim] if vit else [backbone.dim, hidden, dim]
        self.base_encoder = Encoder(backbone, mlp(widths, norm=norm, last_norm=norm))
        self.predictor = mlp([dim, hidden, dim], norm=norm, last_norm=norm and vit) if predictor else nn.Identity()
        self.momentum_encoder = ema_copy(self.base_encoder)

    def forward(self, batch: Batch, at: Progress) -> dict[str, Tensor]:
        x1, x2 = batch.views
        # One forward per view: batch norm must not mix the two.
        q1, q2 = self.predictor(self.base_encoder([x1])), self.predictor(self.base_encoder([x2]))  # (B, C)
        with torch.no_grad():
            # Here, as in the authors' code, not after the optimiser as in the paper's listing: the same sequence.
            ema_update(self.momentum_encoder, self.base_encoder, self.momentum(at))
            k1, k2 = self.momentum_encoder([x1]), self.momentum_encoder([x2])  # (B, C)
        loss = ctr(q1, k2, self.temperature, batch.rows) + ctr(q2, k1, self.temperature, batch.rows)
        return {"loss": loss, "gain": math.log(sum(batch.rows)) - loss / (4 * self.temperature)}

    def export(self) -> Backbone:
        return self.base_encoder.backbone


def ctr(q: Tensor, k: Tensor, tau: float, rows: tuple[int, ...]) -> Tensor:
    """Contrastive loss of queries (B, C) with the keys of all ranks; row i's positive is its own key."""
    q, k = F.normalize(q, dim=1), dist.gather(F.normalize(k, dim=1), rows)
    logits = q @ k.T / tau  # (B, sum of rows)
    labels = torch.arange(len(q), device=q.device) + dist.offset(rows)
    return 2 * tau * F.cross_entropy(logits, labels)
