"""EsViT, views and regions: Li et al. 2022, arXiv:2106.09785, algorithm 1."""

from collections.abc import Sequence
from itertools import groupby
from typing import Literal

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor

from eagleray.config.schedule import Progress, Schedule
from eagleray.config.types import Share
from eagleray.data.batch import Batch
from eagleray.losses.prototypes import choices, match
from eagleray.losses.regions import MATCHINGS, RegionLoss, Side, follow, region_loss, sampled, side, softmax_loss
from eagleray.methods.method import Method
from eagleray.models.backbone import Backbone, Encoder
from eagleray.models.ema import ema_copy, ema_update
from eagleray.models.heads import PrototypeHead, drop_gradients


class EsViT(Method):
    """DINO, and a second head by which each token of a view predicts the likest token of another. The first two views
    are the large crops; only they reach the teacher. K prototypes."""

    views = (2, 100)
    center: Tensor  # (K,)
    region_center: Tensor  # (K,)

    def __init__(
        self,
        backbone: Backbone,
        *,
        prototypes: PositiveInt = 65536,
        hidden: PositiveInt = 2048,
        bottleneck: PositiveInt = 256,
        free_scale: bool = True,  # train the prototypes' lengths
        student_temp: PositiveFloat = 0.1,
        teacher_temp: Schedule = Schedule(value=0.07, warmup_from=0.04, warmup=30, inclusive=True, per_epoch=True),
        momentum: Schedule = Schedule(value=0.996, end=1.0),
        center_momentum: Share = 0.9,
        freeze_last: float = 1.0,  # epochs
        # Half of either, as in algorithm 1 and the authors' code; the text adds them up.
        view_weight: Share = 0.5,
        region_weight: Share = 0.5,
        region_from: float = 0.0,  # epochs in which it is DINO, L_V alone at full weight
        region_loss: RegionLoss = "softmax",
        matching: Literal["argmax", "sinkhorn"] = "argmax",
        tokens: PositiveInt | None = None,  # sampled of a view that has more (DeiT in the paper); None: all
    ) -> None:
        super().__init__()
        self.student_temp, self.teacher_temp = student_temp, teacher_temp
        self.momentum, self.center_momentum, self.freeze_last = momentum, center_momentum, freeze_last
        self.view_weight, self.region_weight, self.region_from = view_weight, region_weight, region_from
        self.region_loss, self.matching = region_loss, matching
        head, region_head = (
            PrototypeHead(backbone.dim, prototypes, hidden=hidden, bottleneck=bottleneck, free_scale=free_scale)
            for _ in range(2)
        )
        self.student = _Encoder(backbone, head, region_head, tokens)
        self.teacher = ema_copy(self.student)
        self.register_buffer("center", torch.zeros(prototypes))
        self.register_buffer("region_center", torch.zeros(prototypes))

    def forward(self, batch: Batch, at: Progress) -> dict[str, Tensor]:
        regions, tau_t = at.epoch >= self.region_from, self.teacher_temp(at)
        s = self.student.sides(batch.views, regions=regions)
        with torch.no_grad():
            t = self.teacher.sides(batch.views[:2], regions=regions)
        l_v = softmax_loss(t[0], s[0], match(s[0].features, t[0].features), self.center, tau_t, self.student_temp)
        if regions:
            matched = MATCHINGS[self.matching](s[1].features, t[1].features)
            l_r = region_loss(self.region_loss, t[1], s[1], matched, self.region_center, tau_t, self.student_temp)
            loss = self.view_weight * l_v + self.region_weight * l_r
            follow(self.region_center, t[1], batch.rows, self.center_momentum)
        else:
            l_r = torch.zeros_like(l_v)
            # Ranks wait for a gradient of every parameter; `before_step` drops these.
            loss = l_v + 0 * torch.stack([p.sum() for p in self.student.region_head.parameters()]).sum()
        chosen = choices(t[0].z, t[0].w, self.center, tau_t)
        # After the loss, which uses the old centre; of scores, and each of its own task, where algorithm 1 has
        # probabilities of views for both.
        follow(self.center, t[0], batch.rows, self.center_momentum)
        return {"loss": loss, "view": l_v, "region": l_r, **chosen}

    def before_step(self, at: Progress) -> None:
        if at.epoch < self.freeze_last:
            drop_gradients(self.student.head.last, self.student.region_head.last)
        if at.epoch < self.region_from:
            drop_gradients(self.student.region_head)

    def after_step(self, at: Progress) -> None:
        ema_update(self.teacher, self.student, self.momentum(at))

    def export(self) -> Backbone:
        return self.teacher.backbone


class _Encoder(Encoder[PrototypeHead]):
    """A second head, for the tokens."""

    def __init__(self, backbone: Backbone, head: PrototypeHead, region_head: PrototypeHead, tokens: int | None) -> None:
        super().__init__(backbone, head)
        self.region_head, self.tokens = region_head, tokens

    def sides(self, views: Sequence[Tensor], *, regions: bool) -> list[Side]:
        """V x (B, 3, S, S), of any sizes, as wholes and, if asked for, as regions."""
        b = len(views[0])
        # Neighbouring views of one size share a forward of the backbone.
        outs = [self.backbone(torch.cat(list(same))) for _, same in groupby(views, key=lambda x: x.shape)]
        found = [side([x for out in outs for x in out.pooled.unsqueeze(1).split(b)], self.head)]
        if regions:
            tokens = [sampled(x, self.tokens) for out in outs for x in out.patches.split(b)]
            found.append(side(tokens, self.region_head))
        return found
