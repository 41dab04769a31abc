"""SelfPatch adds to DINO a loss by which each patch predicts its most similar neighbours (Yun et al. 2022,
arXiv:2206.07990).

Where the paper leaves a choice open, this follows the authors' code. B images, V views, N patches, K prototypes of
images, P prototypes of patches, d channels of the bottleneck."""

from typing import Annotated, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

from eagleray.config.schedule import Progress, Schedule
from eagleray.config.types import Share, Temperature
from eagleray.data.batch import Batch
from eagleray.losses.patches import PatchEncoder, match_patches, patch_scores
from eagleray.losses.prototypes import H, Scores, assignment_stats, match_views, update_center
from eagleray.methods.method import Method
from eagleray.models.backbone import Backbone
from eagleray.models.class_attention import AggregationBackbone
from eagleray.models.ema import ema_copy, ema_update
from eagleray.models.heads import PrototypeHead, drop_gradients


class SelfPatch(Method):
    """DINO on the class attention's output for an image, and the same loss between each patch and its neighbours.

    A student patch predicts the output of the teacher's class attention over the patches around it. The first two views
    are the large crops."""

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
        heads: PositiveInt = 6,  # heads of the class attention, as many as the backbone's
        neighbours: Annotated[int, Field(ge=1, le=8)] = 4,
        # Patches at opposite borders of the image are neighbours, as in the authors' code but not in the paper.
        wrap: bool = True,
        # Crops that the teacher sees and whose patches are compared. The authors' code has all; a comment in it, large.
        crops: Literal["all", "large"] = "all",
        patch_weight: NonNegativeFloat = 0.1,  # 0: DINO alone
        student_temp: PositiveFloat = 0.1,
        teacher_temp: Temperature = Schedule(value=0.04),
        momentum: Schedule = Schedule(value=0.996, end=1.0),
        center_momentum: Share = 0.9,
        freeze_last: float = 1.0,  # number of first epochs in which the prototypes are not trained
    ) -> None:
        super().__init__()
        self.neighbours, self.wrap, self.crops, self.patch_weight = neighbours, wrap, crops, patch_weight
        self.student_temp, self.teacher_temp = student_temp, teacher_temp
        self.momentum, self.center_momentum, self.freeze_last = momentum, center_momentum, freeze_last
        head, patch_head = (
            PrototypeHead(backbone.dim, k, hidden=hidden, bottleneck=bottleneck) for k in (prototypes, patch_prototypes)
        )
        self.student = PatchEncoder(AggregationBackbone(backbone, heads), head, patch_head)
        self.teacher = ema_copy(self.student)
        self.register_buffer("center", torch.zeros(prototypes))
        self.register_buffer("patch_center", torch.zeros(patch_prototypes))

    def forward(self, batch: Batch, at: Progress) -> dict[str, Tensor]:
        images, tau_t, tau_s = len(batch.views[0]), self.teacher_temp(at), self.student_temp
        f = self.student.features(batch.views)  # one part for consecutive views of one size
        with torch.no_grad():
            g = self.teacher.features(batch.views if self.crops == "all" else batch.views[:2])
            t = Scores(self.teacher.images(g), self.teacher.head.last.weight)
            t_parts = self.teacher.targets(g, self.neighbours, wrap=self.wrap)  # (V' * B, N, d) of each part
        s, s_parts = Scores(self.student.images(f), self.student.head.last.weight), self.student.patches(f[: len(g)])

        large = t._replace(z=t.z[: 2 * images])
        loss = H(large, s, match_views(large, s, images), self.center, tau_t, tau_s)
        stats = assignment_stats(large, self.center, tau_t)
        # The loss above uses the centre of the previous steps, so the centre is updated after it. Unlike in DINO, the
        # centre's mean includes the small crops if the teacher sees them (crops=all).
        update_center(self.center, t, batch.rows, self.center_momentum)

        p_t, p_s = patch_scores(t_parts, self.teacher.patch_head), patch_scores(s_parts, self.student.patch_head)
        patch = H(p_t, p_s, match_patches(s_parts), self.patch_center, tau_t, tau_s)
        update_center(self.patch_center, p_t, batch.rows, self.center_momentum)
        return {"loss": loss + self.patch_weight * patch, "patch": patch, **stats}

    def before_step(self, at: Progress) -> None:
        if at.epoch < self.freeze_last:
            drop_gradients(self.student.head.last, self.student.patch_head.last)

    def after_step(self, at: Progress) -> None:
        ema_update(self.teacher, self.student, self.momentum(at))

    def export(self) -> Backbone:
        return self.teacher.backbone
