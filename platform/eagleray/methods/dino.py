"""DINO trains a student to predict the prototypes that its moving average assigns to other views (Caron et al. 2021,
arXiv:2104.14294, algorithm 1).

B images, V views, K prototypes, d channels of the bottleneck."""

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor

from eagleray.config.schedule import Progress, Schedule
from eagleray.config.types import Share, Temperature
from eagleray.data.batch import Batch
from eagleray.losses.prototypes import H, Scores, assignment_stats, match_views, update_center
from eagleray.methods.method import Method
from eagleray.models.backbone import Backbone, Encoder
from eagleray.models.ema import ema_copy, ema_update
from eagleray.models.heads import PrototypeHead, drop_gradients


class DINO(Method):
    """The student sees all views, the teacher only the first two, which are the large crops."""

    views = (2, 100)
    pooled_only = True
    shardable = True
    center: Tensor  # (K,)

    def __init__(
        self,
        backbone: Backbone,
        *,
        prototypes: PositiveInt = 65536,
        hidden: PositiveInt = 2048,
        bottleneck: PositiveInt = 256,
        free_scale: bool = False,  # train the prototypes' lengths: the authors do so for ViT-S, but not for ViT-B
        student_temp: PositiveFloat = 0.1,
        teacher_temp: Temperature = Schedule(value=0.07, warmup_from=0.04, warmup=30, inclusive=True, per_epoch=True),
        momentum: Schedule = Schedule(value=0.996, end=1.0),
        center_momentum: Share = 0.9,
        freeze_last: float = 1.0,  # number of first epochs in which the prototypes are not trained
    ) -> None:
        super().__init__()
        self.student_temp, self.teacher_temp = student_temp, teacher_temp
        self.momentum, self.center_momentum, self.freeze_last = momentum, center_momentum, freeze_last
        head = PrototypeHead(backbone.dim, prototypes, hidden=hidden, bottleneck=bottleneck, free_scale=free_scale)
        self.student = Encoder(backbone, head)
        self.teacher = ema_copy(self.student)
        self.register_buffer("center", torch.zeros(prototypes))

    def forward(self, batch: Batch, at: Progress) -> dict[str, Tensor]:
        s = Scores(self.student(batch.views), self.student.head.last.weight)  # V * B crops
        with torch.no_grad():
            t = Scores(self.teacher(batch.views[:2]), self.teacher.head.last.weight)  # 2 * B crops
        pairs, tau_t = match_views(t, s, len(batch.views[0])), self.teacher_temp(at)
        loss = H(t, s, pairs, self.center, tau_t, self.student_temp)
        stats = assignment_stats(t, self.center, tau_t)
        # The loss above uses the centre of the previous steps, so the centre is updated after it: as in the paper, by
        # the mean of the teacher's scores of the images of all ranks.
        update_center(self.center, t, batch.rows, self.center_momentum)
        return {"loss": loss, **stats}

    def before_step(self, at: Progress) -> None:
        if at.epoch < self.freeze_last:
            drop_gradients(self.student.head.last)

    def after_step(self, at: Progress) -> None:
        ema_update(self.teacher, self.student, self.momentum(at))

    def export(self) -> Backbone:
        return self.teacher.backbone
