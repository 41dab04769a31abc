"""MoCo v3 contrasts two views with the keys of the whole batch, without a queue (Chen, Xie and He 2021,
arXiv:2104.02057, algorithm 1).

B images, C channels."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn

from eagleray.base import dist
from eagleray.config.schedule import Progress, Schedule
from eagleray.data.batch import Batch
from eagleray.losses.products import inner, unit
from eagleray.methods.method import Method
from eagleray.models.backbone import Backbone, Encoder
from eagleray.models.batch_norm import each_view
from eagleray.models.ema import ema_copy, ema_update
from eagleray.models.heads import mlp


class MoCoV3(Method):
    """Each view gives queries and keys; the negatives of a query are the keys of all other images on all ranks."""

    views = (2, 2)
    pooled_only = True
    shardable = True

    def __init__(
        self,
        backbone: Backbone,
        *,
        dim: PositiveInt = 256,
        hidden: PositiveInt = 4096,
        # r50: a projector of two layers and no norm at the predictor's end, as in the authors' code for ResNet-50; the
        # paper has three layers and norms everywhere. The name of a backbone does not say which heads are meant.
        heads: Literal["vit", "r50"] = "vit",
        norm: bool = True,  # batch norm in both heads
        # Batch norm, also a backbone's, sees both crops together (SimCLR's code), not each crop separately (BYOL's).
        joint_norm: bool = False,
        predictor: bool = True,
        temperature: PositiveFloat = 0.2,
        momentum: Schedule = Schedule(value=0.99, end=1.0),  # 0.99 in the paper; the code raises it for ViTs
    ) -> None:
        super().__init__()
        self.temperature, self.momentum, self.joint_norm = temperature, momentum, joint_norm
        vit = heads == "vit"
        widths = [backbone.dim, hidden, hidden, dim] if vit else [backbone.dim, hidden, dim]
        self.base_encoder = Encoder(backbone, mlp(widths, norm=norm, last_norm=norm))
        self.predictor = mlp([dim, hidden, dim], norm=norm, last_norm=norm and vit) if predictor else nn.Identity()
        self.momentum_encoder = ema_copy(self.base_encoder)

    def forward(self, batch: Batch, at: Progress) -> dict[str, Tensor]:
        q1, q2 = self._outputs(self.base_encoder, self.predictor, batch.views)  # (B, C)
        with torch.no_grad():
            # The update comes here, as in the authors' code, not after the optimiser's step, as in algorithm 1; keys
            # are computed with the same weights in both cases.
            ema_update(self.momentum_encoder, self.base_encoder, self.momentum(at))
            k1, k2 = self._outputs(self.momentum_encoder, nn.Identity(), batch.views)  # (B, C)
        loss = ctr(q1, k2, self.temperature, batch.rows) + ctr(q2, k1, self.temperature, batch.rows)
        return {"loss": loss, "gain": math.log(sum(batch.rows)) - loss / (4 * self.temperature)}

    def _outputs(self, encoder: Encoder[Any], head: nn.Module, views: Sequence[Tensor]) -> Iterable[Tensor]:
        """Return the head's output (B, C) for the encoder's output of each view (B, 3, S, S)."""
        if self.joint_norm:
            joint: Tensor = head(encoder(views))
            return joint.chunk(len(views))
        return each_view(head, encoder.each(views))  # batch norm must not mix two views

    def export(self) -> Backbone:
        return self.base_encoder.backbone


def ctr(q: Tensor, k: Tensor, tau: float, rows: tuple[int, ...]) -> Tensor:
    """Return the contrastive loss of queries q (B, C) with all ranks' keys k; a query's positive is its row of k."""
    q, k = unit(q), dist.gather(unit(k), rows)
    logits = inner(q, k) / tau  # (B, sum of rows)
    labels = torch.arange(len(q), device=q.device) + dist.offset(rows)
    return 2 * tau * F.cross_entropy(logits, labels)
