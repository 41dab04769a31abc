"""EsViT adds to DINO a loss that matches the tokens of one view with those of another (Li et al. 2022,
arXiv:2106.09785, algorithm 1).

B images, V views, K prototypes."""

from collections.abc import Sequence
from itertools import groupby
from typing import Literal

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor

from eagleray.base.rng import step_generator
from eagleray.config.schedule import Progress, Schedule
from eagleray.config.types import Share, Temperature
from eagleray.data.batch import Batch
from eagleray.losses.places import right_share
from eagleray.losses.prototypes import H, Match, Scores, assignment_stats, check_large_crops, match_views, update_center
from eagleray.losses.regions import MATCHINGS, RegionLoss, Regions, project_regions, region_loss, sample_tokens
from eagleray.methods.method import Method
from eagleray.models.backbone import Backbone, Encoder
from eagleray.models.ema import ema_copy, ema_update
from eagleray.models.heads import PrototypeHead, drop_gradients, zero_loss


class EsViT(Method):
    """DINO with a second head, through which each token of a view predicts the most similar token of another view.

    The student sees all views, the teacher only the first two, which are the large crops."""

    views = (2, 100)
    needs_boxes = None  # boxes are used only for a metric, the share of right matches
    may_change = ("region_from",)  # a run that began without the region loss may add it when it is continued
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
        teacher_temp: Temperature = Schedule(value=0.07, warmup_from=0.04, warmup=30, inclusive=True, per_epoch=True),
        momentum: Schedule = Schedule(value=0.996, end=1.0),
        center_momentum: Share = 0.9,
        freeze_last: float = 1.0,  # number of first epochs in which the prototypes are not trained
        # Weight of the loss on views: half as in algorithm 1 and the authors' code; the paper's text adds both losses.
        view_weight: Share = 0.5,
        region_weight: Share = 0.5,
        region_from: float = 0.0,  # number of first epochs with only the loss on views, at full weight, as in DINO
        region_loss: RegionLoss = "softmax",
        matching: Literal["argmax", "sinkhorn"] = "argmax",
        tokens: PositiveInt | None = None,  # tokens sampled from a view that has more (DeiT in the paper); None: all
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
        regions, tau_t, tau_s = at.epoch >= self.region_from, self.teacher_temp(at), self.student_temp
        generator = step_generator(at.draw, batch.views[0].device) if regions else None
        s, s_regions = self.student.project(batch.views, generator)
        with torch.no_grad():
            t, t_regions = self.teacher.project(batch.views[:2], generator)
        l_v = H(t, s, match_views(t, s, len(batch.views[0])), self.center, tau_t, tau_s)
        if s_regions and t_regions:
            pairs = MATCHINGS[self.matching](s_regions.features, t_regions.features)
            l_r = region_loss(self.region_loss, t_regions, s_regions, pairs, self.region_center, tau_t, tau_s)
            loss = self.view_weight * l_v + self.region_weight * l_r
            update_center(self.region_center, t_regions.scores, batch.rows, self.center_momentum)
            right = self.right(pairs, batch, s_regions, t_regions)
        else:
            l_r = right = torch.zeros_like(l_v)
            # Ranks wait for a gradient of all parameters; `before_step` drops the zeros, so that weights do not decay.
            loss = l_v + zero_loss(self.student.region_head)
        stats = assignment_stats(t, self.center, tau_t)
        # The loss above uses the centre of the previous steps, so the centre is updated after it. As in the authors'
        # code, each loss has its own centre, a mean of scores; in algorithm 1 both are means of probabilities.
        update_center(self.center, t, batch.rows, self.center_momentum)
        return {"loss": loss, "view": l_v, "region": l_r, "right": right, **stats}

    def right(self, pairs: Match, batch: Batch, s: Regions, t: Regions) -> Tensor:
        """Return the share of matches with the nearest token in the image; -1 without boxes or with sampled tokens."""
        if batch.boxes is None or self.student.tokens:
            return torch.full_like(pairs.weight[0], -1)
        return right_share(pairs, batch.boxes, s.features, t.features)

    def check_views(self, views: Sequence[Tensor]) -> None:
        check_large_crops(views)

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
    """An encoder with a second head, for the tokens."""

    def __init__(self, backbone: Backbone, head: PrototypeHead, region_head: PrototypeHead, tokens: int | None) -> None:
        super().__init__(backbone, head)
        self.region_head, self.tokens = region_head, tokens

    def project(self, views: Sequence[Tensor], generator: torch.Generator | None) -> tuple[Scores, Regions | None]:
        """Return the scores of V views (B, 3, S, S) of any sizes and, with a generator, the Regions of their tokens.

        The generator samples the tokens of views that have more than `self.tokens` of them."""
        b = len(views[0])
        outs = self.backbone.sizes([torch.cat(list(same)) for _, same in groupby(views, key=lambda x: x.shape)])
        scores = Scores(self.head(torch.cat([out.pooled for out in outs])), self.head.last.weight)
        if generator is None:
            return scores, None
        tokens = [sample_tokens(x, self.tokens, generator) for out in outs for x in out.patches.split(b)]
        return scores, project_regions(tokens, self.region_head)
