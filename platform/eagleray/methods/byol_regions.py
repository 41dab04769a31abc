"""BYOL with the region loss of EsViT learns from pooled vectors and from matched tokens (Li et al. 2022).

arXiv:2106.09785, section 4.3; BYOL: Grill et al. 2020, arXiv:2006.07733, algorithm 1. B images, C channels of the
projection, K prototypes.
"""

from collections.abc import Sequence

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn

from eagleray.config.schedule import Progress, Schedule
from eagleray.config.types import Share
from eagleray.data.batch import Batch
from eagleray.losses.products import cosine
from eagleray.losses.prototypes import check_large_crops, match, update_center
from eagleray.losses.regions import RegionLoss, Regions, project_regions, region_loss
from eagleray.methods.method import Method
from eagleray.models.backbone import Backbone, Encoder, Features
from eagleray.models.ema import ema_copy, ema_update
from eagleray.models.heads import PrototypeHead, mlp


class BYOLRegions(Method):
    """BYOL on the pooled vectors of two views, EsViT's region loss on their tokens."""

    views = (2, 2)
    region_center: Tensor  # (K,)

    def __init__(
        self,
        backbone: Backbone,
        *,
        dim: PositiveInt = 256,
        hidden: PositiveInt = 4096,
        momentum: Schedule = Schedule(value=0.996, end=1.0),
        prototypes: PositiveInt = 65536,
        region_hidden: PositiveInt = 2048,
        bottleneck: PositiveInt = 256,
        student_temp: PositiveFloat = 0.1,
        teacher_temp: Schedule = Schedule(value=0.07, warmup_from=0.04, warmup=30, inclusive=True, per_epoch=True),
        center_momentum: Share = 0.9,
        region_weight: PositiveFloat = 1.0,
        region_loss: RegionLoss = "softmax",
    ) -> None:
        super().__init__()
        self.momentum, self.center_momentum = momentum, center_momentum
        self.student_temp, self.teacher_temp = student_temp, teacher_temp
        self.region_weight, self.region_loss = region_weight, region_loss
        region_head = PrototypeHead(
            backbone.dim, prototypes, hidden=region_hidden, bottleneck=bottleneck, free_scale=True
        )
        self.online = _Encoder(backbone, mlp([backbone.dim, hidden, dim], norm=True), region_head)
        self.predictor = mlp([dim, hidden, dim], norm=True)
        self.target = ema_copy(self.online)
        self.register_buffer("region_center", torch.zeros(prototypes))

    def forward(self, batch: Batch, at: Progress) -> dict[str, Tensor]:
        f1, f2 = self.online.backbone.each(batch.views)
        # One call per view: batch norm must not mix the two.
        p1, p2 = self.predictor(self.online.head(f1.pooled)), self.predictor(self.online.head(f2.pooled))  # (B, C)
        with torch.no_grad():
            g1, g2 = self.target.backbone.each(batch.views)
            z1, z2 = self.target.head(g1.pooled), self.target.head(g2.pooled)  # (B, C)
            t = self.target.regions(g1, g2)
        l_v = distance(p1, z2) + distance(p2, z1)
        s, tau_t = self.online.regions(f1, f2), self.teacher_temp(at)
        pairs = match(s.features, t.features)
        l_r = region_loss(self.region_loss, t, s, pairs, self.region_center, tau_t, self.student_temp)
        update_center(self.region_center, t.scores, batch.rows, self.center_momentum)
        return {"loss": l_v + self.region_weight * l_r, "view": l_v, "region": l_r}

    def check_views(self, views: Sequence[Tensor]) -> None:
        check_large_crops(views)

    def after_step(self, at: Progress) -> None:
        ema_update(self.target, self.online, self.momentum(at))

    def export(self) -> Backbone:
        return self.online.backbone


class _Encoder(Encoder[nn.Sequential]):
    """An encoder with a second head, for the tokens."""

    def __init__(self, backbone: Backbone, head: nn.Sequential, region_head: PrototypeHead) -> None:
        super().__init__(backbone, head)
        self.region_head = region_head

    def regions(self, *views: Features) -> Regions:
        """Return the tokens of views and their scores."""
        return project_regions([x.patches for x in views], self.region_head)


def distance(p: Tensor, z: Tensor) -> Tensor:
    """Return BYOL's equation 2: the mean squared distance of predictions and targets (B, C), scaled to unit length."""
    return 2 - 2 * cosine(p, z).mean()
