"""MoCo v3: Chen, Xie and He 2021, arXiv:2104.02057, algorithm 1."""

import torch
import torch.nn.functional as F
from torch import Tensor

from eagleray import dist
from eagleray.data.batch import Batch
from eagleray.methods.method import Method
from eagleray.models.backbone import Backbone, Encoder
from eagleray.models.ema import ema_copy, ema_update
from eagleray.models.heads import mlp
from eagleray.schedule import Progress, Schedule


class MoCoV3(Method):
    """Two views; in-batch keys from every rank, no queue."""

    views = (2, 2)

    def __init__(
        self,
        backbone: Backbone,
        *,
        dim: int = 256,
        hidden: int = 4096,
        temperature: float = 0.2,
        momentum: Schedule = Schedule(
            value=0.99, end=1.0
        ),  # the paper says 0.99; the released ViT recipe ramps it to 1
    ) -> None:
        super().__init__()
        self.temperature, self.momentum = temperature, momentum
        self.base_encoder = Encoder(backbone, mlp([backbone.dim, hidden, hidden, dim], norm=True, last_norm=True))
        self.predictor = mlp([dim, hidden, dim], norm=True, last_norm=True)
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
        return {"loss": loss}

    def export(self) -> Backbone:
        return self.base_encoder.backbone


def ctr(q: Tensor, k: Tensor, tau: float, rows: tuple[int, ...]) -> Tensor:
    """Contrastive loss of queries (B, C) with the keys of all ranks; row i's positive is its own key."""
    q, k = F.normalize(q, dim=1), dist.gather(F.normalize(k, dim=1), rows)
    logits = q @ k.T / tau  # (B, sum of rows)
    labels = torch.arange(len(q), device=q.device) + dist.offset(rows)
    return 2 * tau * F.cross_entropy(logits, labels)
