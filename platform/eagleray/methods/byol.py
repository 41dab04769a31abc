"""BYOL predicts a momentum encoder's projection of the other view, without negatives (Grill et al. 2020,
arXiv:2006.07733, algorithm 1).

B images, C channels."""

import torch
from pydantic import PositiveInt
from torch import Tensor

from eagleray.config.schedule import Progress, Schedule
from eagleray.config.types import Layers
from eagleray.data.batch import Batch
from eagleray.losses.products import distance
from eagleray.methods.method import Method
from eagleray.models.backbone import Backbone, Encoder
from eagleray.models.ema import ema_copy, ema_update
from eagleray.models.heads import mlp


class BYOL(Method):
    """Through the online network, each view predicts the momentum copy's projections of the first two, except its own.

    Only the online network sees further views, such as small crops."""

    views = (2, 100)
    pooled_only = True

    def __init__(
        self,
        backbone: Backbone,
        *,
        dim: PositiveInt = 256,
        hidden: PositiveInt = 4096,
        layers: Layers = 2,  # linear layers in the projector; MoCo v3's study of ViTs has 3
        momentum: Schedule = Schedule(value=0.996, end=1.0),
    ) -> None:
        super().__init__()
        self.momentum = momentum
        # Batch norm in the hidden layers only, as in the paper: the outputs have none.
        self.online = Encoder(backbone, mlp([backbone.dim] + [hidden] * (layers - 1) + [dim], norm=True))
        self.predictor = mlp([dim, hidden, dim], norm=True)
        self.target = ema_copy(self.online)

    def forward(self, batch: Batch, at: Progress) -> dict[str, Tensor]:
        # The head runs once per view, as its batch norm must not mix views.
        p = [self.predictor(z) for z in self.online.each(batch.views)]  # V x (B, C)
        with torch.no_grad():
            z = self.target.each(batch.views[:2])  # 2 x (B, C)
        pairs = [distance(pv, zi) for v, pv in enumerate(p) for i, zi in enumerate(z) if i != v]
        return {"loss": torch.stack(pairs).sum() * (2 / len(pairs))}  # for two views: the sum of both directions

    def after_step(self, at: Progress) -> None:
        ema_update(self.target, self.online, self.momentum(at))

    def export(self) -> Backbone:
        return self.online.backbone
