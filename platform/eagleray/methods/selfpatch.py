"""SelfPatch on DINO: Yun et al. 2022, arXiv:2206.07990; what its text leaves open is as in the authors' code."""

from typing import Annotated, Literal

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor

from eagleray.config.schedule import Progress, Schedule
from eagleray.config.types import Share
from eagleray.data.batch import Batch
from eagleray.losses.patches import PatchEncoder, mean_patch_scores, patch_loss
from eagleray.losses.prototypes import choices, cross_entropy, match, mean_scores
from eagleray.methods.method import Method
from eagleray.models.backbone import Backbone
from eagleray.models.class_attention import Aggregated
from eagleray.models.ema import ema_copy, ema_update
from eagleray.models.heads import PrototypeHead, drop_gradients


class SelfPatch(Method):
    """DINO on what class attention makes of an image; and of each patch, what it makes of the likest patches around it
    is to be seen in the patch itself. The first two views are the large crops. K prototypes of images, P of patches."""

    views = (2, 100)
    center: Tensor  # (K,)
    patch_center: Tensor  # (P,)

    def __init__(
        self,
        backbone: Backbone,
        *,
        prototypes: PositiveInt = 65536,
        patch_prototypes: PositiveInt = 4096,
        hidden: PositiveInt = 2048,
        bottleneck: PositiveInt = 256,
        heads: PositiveInt = 6,  # of the class attention: as many as the backbone's
        neighbours: Annotated[int, Field(ge=1, le=8)] = 4,
        # A patch at the border has those at the opposite one for neighbours: the authors' code, not the paper's text.
        wrap: bool = True,
        # What the teacher sees, and whose patches are compared. The code shows it all; its comment says large.
        crops: Literal["all", "large"] = "all",
        patch_weight: PositiveFloat = 0.1,
        student_temp: PositiveFloat = 0.1,
        teacher_temp: Schedule = Schedule(value=0.04),
        momentum: Schedule = Schedule(value=0.996, end=1.0),
        center_momentum: Share = 0.9,
        freeze_last: float = 1.0,  # epochs
    ) -> None:
        super().__init__()
        self.neighbours, self.wrap, self.crops, self.patch_weight = neighbours, wrap, crops, patch_weight
        self.student_temp, self.teacher_temp = student_temp, teacher_temp
        self.momentum, self.center_momentum, self.freeze_last = momentum, center_momentum, freeze_last
        head, patch_head = (
            PrototypeHead(backbone.dim, k, hidden=hidden, bottleneck=bottleneck) for k in (prototypes, patch_prototypes)
        )
        self.student = PatchEncoder(Aggregated(backbone, heads), head, patch_head)
        self.teacher = ema_copy(self.student)
        self.register_buffer("center", torch.zeros(prototypes))
        self.register_buffer("patch_center", torch.zeros(patch_prototypes))

    def forward(self, batch: Batch, at: Progress) -> dict[str, Tensor]:
        taught = batch.views if self.crops == "all" else batch.views[:2]
        f = self.student.features(batch.views)
        with torch.no_grad():
            g = self.teacher.features(taught)
            t = self.teacher.images(g)  # (V * B, d)
            t_patches = self.teacher.targets(g, self.neighbours, wrap=self.wrap)  # (V' * B, N, d) of each part
        s, s_patches = self.student.images(f), self.student.patches(f[: len(g)])
        tau_t, tau_s = self.teacher_temp(at), self.student_temp

        w_s, w_t, large = self.student.head.last.weight, self.teacher.head.last.weight, t[: 2 * len(batch.views[0])]
        # Every view with every other.
        pairs = match(s.unsqueeze(1).chunk(len(batch.views)), large.unsqueeze(1).chunk(2))
        loss = cross_entropy(large, s, w_t, w_s, self.center, pairs, tau_t=tau_t, tau_s=tau_s)
        chosen = choices(large, w_t, self.center, tau_t)
        # After the loss; over small crops too where the teacher sees them, unlike DINO's.
        self.center.lerp_(mean_scores(t, w_t, len(taught) * sum(batch.rows)), 1 - self.center_momentum)

        w_s, w_t = self.student.patch_head.last.weight, self.teacher.patch_head.last.weight
        patch = patch_loss(t_patches, s_patches, w_t, w_s, self.patch_center, tau_t=tau_t, tau_s=tau_s)
        self.patch_center.lerp_(mean_patch_scores(t_patches, w_t, batch.rows), 1 - self.center_momentum)
        return {"loss": loss + self.patch_weight * patch, "patch": patch, **chosen}

    def before_step(self, at: Progress) -> None:
        if at.epoch < self.freeze_last:
            drop_gradients(self.student.head.last, self.student.patch_head.last)

    def after_step(self, at: Progress) -> None:
        ema_update(self.teacher, self.student, self.momentum(at))

    def export(self) -> Backbone:
        return self.teacher.backbone
