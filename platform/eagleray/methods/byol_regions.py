"""BYOL with the region loss of EsViT learns from pooled vectors and from matched tokens (Li et al. 2022,
arXiv:2106.09785, section 4.3; BYOL: Grill et al. 2020, arXiv:2006.07733, algorithm 1).

B images, N tokens of D channels, C channels of the projection, K prototypes."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn

from eagleray.config.schedule import Progress, Schedule
from eagleray.config.types import Share, Temperature
from eagleray.data.batch import Batch
from eagleray.losses.products import distance
from eagleray.losses.prototypes import H, check_large_crops, match, update_center
from eagleray.losses.regions import RegionLoss, matched_distance, project_regions
from eagleray.methods.method import Method
from eagleray.models.backbone import Backbone, Encoder
from eagleray.models.ema import ema_copy, ema_update
from eagleray.models.heads import PrototypeHead, drop_gradients, mlp


class BYOLRegions(Method):
    """BYOL on the pooled vectors of two views, with a region loss on their tokens.

    With `region_loss=softmax`, the region loss is EsViT's, with EsViT's head, centre and frozen last layer. With `mse`,
    tokens have a projector and a predictor, as pooled vectors have in BYOL. The paper does not say so, but without a
    predictor the loss would be smallest if all tokens had the same vector."""

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
        teacher_temp: Temperature = Schedule(value=0.07, warmup_from=0.04, warmup=30, inclusive=True, per_epoch=True),
        center_momentum: Share = 0.9,
        freeze_last: float = 1.0,  # number of first epochs in which the prototypes are not trained
        region_weight: NonNegativeFloat = 1.0,  # 0: BYOL alone
        region_loss: RegionLoss = "softmax",
    ) -> None:
        super().__init__()
        self.momentum, self.center_momentum, self.freeze_last = momentum, center_momentum, freeze_last
        self.student_temp, self.teacher_temp = student_temp, teacher_temp
        self.region_weight, self.region_loss = region_weight, region_loss
        region_head: nn.Module = (
            PrototypeHead(backbone.dim, prototypes, hidden=region_hidden, bottleneck=bottleneck, free_scale=True)
            if region_loss == "softmax"
            else mlp([backbone.dim, hidden, dim], norm=True)
        )
        self.online = _Encoder(backbone, mlp([backbone.dim, hidden, dim], norm=True), region_head)
        self.predictor = mlp([dim, hidden, dim], norm=True)
        self.region_predictor = mlp([dim, hidden, dim], norm=True) if region_loss == "mse" else nn.Identity()
        self.target = ema_copy(self.online)
        self.register_buffer("region_center", torch.zeros(prototypes))

    def forward(self, batch: Batch, at: Progress) -> dict[str, Tensor]:
        f1, f2 = self.online.backbone.each(batch.views)
        # The heads run once per view, as their batch norm must not mix views.
        p1, p2 = self.predictor(self.online.head(f1.pooled)), self.predictor(self.online.head(f2.pooled))  # (B, C)
        with torch.no_grad():
            g1, g2 = self.target.backbone.each(batch.views)
            z1, z2 = self.target.head(g1.pooled), self.target.head(g2.pooled)  # (B, C)
        l_v = distance(p1, z2) + distance(p2, z1)
        s, t = [f1.patches, f2.patches], [g1.patches, g2.patches]
        l_r = self.predicted(s, t) if self.region_loss == "mse" else self.assigned(s, t, batch.rows, at)
        return {"loss": l_v + self.region_weight * l_r, "view": l_v, "region": l_r}

    def assigned(self, s: list[Tensor], t: list[Tensor], rows: Sequence[int], at: Progress) -> Tensor:
        """Return EsViT's region loss for student tokens s and teacher tokens t of two views, 2 x (B, N, D) each, and
        update the loss's centre."""
        student = project_regions(s, self.online.region_head)
        with torch.no_grad():
            teacher = project_regions(t, self.target.region_head)
        tau_t, tau_s = self.teacher_temp(at), self.student_temp
        l_r = H(teacher.scores, student.scores, match(s, t), self.region_center, tau_t, tau_s)
        update_center(self.region_center, teacher.scores, rows, self.center_momentum)
        return l_r

    def predicted(self, s: list[Tensor], t: list[Tensor]) -> Tensor:
        """Return BYOL's distance between student tokens s and the teacher tokens t that match them in the other view,
        2 x (B, N, D) each."""
        p = torch.cat([self.region_predictor(self.online.region_head(x.flatten(0, 1))) for x in s])
        with torch.no_grad():
            z = torch.cat([self.target.region_head(x.flatten(0, 1)) for x in t])
        with torch.autocast(p.device.type, enabled=False):
            return matched_distance(F.normalize(p.float(), dim=1), F.normalize(z.float(), dim=1), match(s, t))

    def check_views(self, views: Sequence[Tensor]) -> None:
        check_large_crops(views)

    def before_step(self, at: Progress) -> None:
        if self.region_loss == "softmax" and at.epoch < self.freeze_last:
            drop_gradients(self.online.region_head.last)

    def after_step(self, at: Progress) -> None:
        ema_update(self.target, self.online, self.momentum(at))

    def export(self) -> Backbone:
        return self.online.backbone


class _Encoder(Encoder[nn.Sequential]):
    """An encoder with a second head, for the tokens."""

    def __init__(self, backbone: Backbone, head: nn.Sequential, region_head: Any) -> None:
        super().__init__(backbone, head)
        self.region_head = region_head
