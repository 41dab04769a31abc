"""SelfPatch on MoBY adds SelfPatch's loss of patches to MoBY's two queues (Yun et al. 2022, arXiv:2206.07990, section
5; Xie et al. 2021, arXiv:2105.04553).

What neither paper defines is decided in docs/decisions/0011-selfpatch-on-moby.md. B images, N patches, C channels of a
key, P prototypes of patches, d channels of the bottleneck."""

import math
from typing import Annotated

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor

from eagleray.base import dist
from eagleray.config.schedule import Progress, Schedule
from eagleray.config.types import Share, Temperature
from eagleray.data.batch import Batch
from eagleray.losses.infonce import infonce, logits
from eagleray.losses.patches import PatchEncoder, match_patches, patch_scores
from eagleray.losses.products import unit
from eagleray.losses.prototypes import H, assignment_stats, update_center
from eagleray.methods.method import Method
from eagleray.models.backbone import Backbone
from eagleray.models.class_attention import AggregationBackbone
from eagleray.models.ema import ema_copy, ema_update
from eagleray.models.heads import PrototypeHead, drop_gradients, mlp
from eagleray.models.queue import Queue


class SelfPatchMoBY(Method):
    """MoBY on the class attention's output for an image, and SelfPatch's loss with the momentum copy as teacher."""

    views = (2, 2)
    patch_center: Tensor  # (P,)

    def __init__(
        self,
        backbone: Backbone,
        *,
        dim: PositiveInt = 256,
        hidden: PositiveInt = 4096,
        temperature: PositiveFloat = 0.2,
        queue: PositiveInt = 4096,
        momentum: Schedule = Schedule(value=0.99, end=1.0),
        patch_prototypes: PositiveInt = 4096,
        patch_hidden: PositiveInt = 2048,
        bottleneck: PositiveInt = 256,
        heads: PositiveInt = 3,  # heads of the class attention, as many as the backbone's
        neighbours: Annotated[int, Field(ge=1, le=8)] = 4,
        wrap: bool = True,  # patches at opposite borders of the image are neighbours
        patch_weight: PositiveFloat = 0.1,
        student_temp: PositiveFloat = 0.1,
        teacher_temp: Temperature = Schedule(value=0.04),
        center_momentum: Share = 0.9,
        freeze_last: float = 1.0,  # number of first epochs in which the prototypes are not trained
    ) -> None:
        super().__init__()
        self.temperature, self.momentum = temperature, momentum
        self.neighbours, self.wrap, self.patch_weight = neighbours, wrap, patch_weight
        self.student_temp, self.teacher_temp = student_temp, teacher_temp
        self.center_momentum, self.freeze_last = center_momentum, freeze_last
        patch_head = PrototypeHead(backbone.dim, patch_prototypes, hidden=patch_hidden, bottleneck=bottleneck)
        self.online = PatchEncoder(
            AggregationBackbone(backbone, heads), mlp([backbone.dim, hidden, dim], norm=True, bias=True), patch_head
        )
        self.predictor = mlp([dim, hidden, dim], norm=True, bias=True)
        self.target = ema_copy(self.online)
        self.queue1, self.queue2 = Queue(dim, queue), Queue(dim, queue)
        self.register_buffer("patch_center", torch.zeros(patch_prototypes))

    def forward(self, batch: Batch, at: Progress) -> dict[str, Tensor]:
        f = self.online.backbone.each(batch.views)
        # The heads run once per view, as their batch norm must not mix views.
        q1, q2 = (unit(self.predictor(self.online.images([x]))) for x in f)  # (B, C)
        s = self.online.patches(f)  # 2 x (B, N, d)
        with torch.no_grad():
            ema_update(self.target, self.online, self.momentum(at))
            g = self.target.backbone.each(batch.views)
            k1, k2 = (unit(self.target.images([x])) for x in g)  # (B, C)
            t = self.target.targets(g, self.neighbours, wrap=self.wrap)  # 2 x (B, N, d)
        l1 = infonce(logits(q1, k2, self.queue2.keys, self.temperature))
        l2 = infonce(logits(q2, k1, self.queue1.keys, self.temperature))
        self.queue1.push(dist.gather(k1, batch.rows))
        self.queue2.push(dist.gather(k2, batch.rows))

        p_t, p_s = patch_scores(t, self.target.patch_head), patch_scores(s, self.online.patch_head)
        tau_t = self.teacher_temp(at)
        patch = H(p_t, p_s, match_patches(s), self.patch_center, tau_t, self.student_temp)
        stats = assignment_stats(p_t, self.patch_center, tau_t)
        update_center(self.patch_center, p_t, batch.rows, self.center_momentum)
        gain = math.log(1 + self.queue1.keys.shape[1]) - (l1 + l2) / 2
        return {"loss": l1 + l2 + self.patch_weight * patch, "patch": patch, "gain": gain, **stats}

    def before_step(self, at: Progress) -> None:
        if at.epoch < self.freeze_last:
            drop_gradients(self.online.patch_head.last)

    def export(self) -> Backbone:
        return self.online.backbone
