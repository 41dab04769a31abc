"""DINOv2 joins the losses of DINO and iBOT, balances their targets and spreads features apart (Oquab et al. 2023,
arXiv:2304.07193, section 4).

Where the paper leaves a choice open, this follows the authors' code. B images, V views, N patches of a large crop, n
hidden patches, K prototypes of images, P prototypes of patches, D channels."""

from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

from eagleray.base import dist
from eagleray.config.schedule import Progress, Schedule
from eagleray.config.types import Share, Temperature
from eagleray.data.batch import Batch
from eagleray.losses.koleo import koleo_loss
from eagleray.losses.masked import MaskedEncoder, draw_masks, stratified_shares
from eagleray.losses.prototypes import H, Scores, assignment_stats, match_views, mean_scores, update_center
from eagleray.losses.sinkhorn import sinkhorn_center
from eagleray.methods.method import Method
from eagleray.models.backbone import Backbone
from eagleray.models.ema import ema_copy, ema_update
from eagleray.models.heads import PrototypeHead, drop_gradients

ITERATIONS, SMALLEST = 3, 4  # rounds of Sinkhorn-Knopp, and fewest patches in a masked block, as in the authors' code


class DINOv2(Method):
    """The student sees all views, the first two with hidden patches; the teacher sees these two with all patches."""

    views = (2, 100)
    center: Tensor  # (K,)
    patch_center: Tensor  # (P,)

    def __init__(
        self,
        backbone: Backbone,
        *,
        prototypes: PositiveInt = 131072,
        patch_prototypes: PositiveInt | None = 131072,  # prototypes of a head for patches; None: the images' head
        hidden: PositiveInt = 2048,
        bottleneck: PositiveInt = 256,
        patch_bottleneck: PositiveInt = 256,  # bottleneck of the head for patches alone
        mask_probability: Share = 0.5,  # share of the large crops in which patches are hidden
        mask_ratio: tuple[Share, Share] = (0.1, 0.5),  # range of the share of a crop's patches that are hidden
        # mean: subtract the mean score of each prototype, as in DINO and in the authors' run on ImageNet-1k.
        centering: Literal["sinkhorn", "mean"] = "sinkhorn",
        koleo_weight: NonNegativeFloat = 0.1,
        student_temp: PositiveFloat = 0.1,
        teacher_temp: Temperature = Schedule(value=0.07, warmup_from=0.04, warmup=30, inclusive=True),
        momentum: Schedule = Schedule(value=0.994, end=1.0),
        center_momentum: Share = 0.9,  # used with centering=mean
        freeze_last: float = 1.0,  # number of first epochs in which the prototypes are not trained
    ) -> None:
        super().__init__()
        self.mask_probability, self.mask_ratio, self.centering = mask_probability, mask_ratio, centering
        self.koleo_weight, self.student_temp, self.teacher_temp = koleo_weight, student_temp, teacher_temp
        self.momentum, self.center_momentum, self.freeze_last = momentum, center_momentum, freeze_last
        # Unlike in DINO, the prototypes' lengths are always trained.
        make = partial(PrototypeHead, backbone.dim, hidden=hidden, free_scale=True)
        patch_head = make(patch_prototypes, bottleneck=patch_bottleneck) if patch_prototypes else None
        self.student = MaskedEncoder(backbone, make(prototypes, bottleneck=bottleneck), patch_head)
        self.teacher = ema_copy(self.student)
        self.register_buffer("center", torch.zeros(prototypes))
        self.register_buffer("patch_center", torch.zeros(patch_prototypes or prototypes))

    def check_views(self, views: Sequence[Tensor]) -> None:
        self.student.check_views(views, self.mask_ratio)

    def forward(self, batch: Batch, at: Progress) -> dict[str, Tensor]:
        images, tau_t, tau_s = len(batch.views[0]), self.teacher_temp(at), self.student_temp
        grid = self.student.backbone.patch_grid(batch.views[0])
        shares = stratified_shares(sum(batch.rows), self.mask_probability, self.mask_ratio, at.draw)
        masks = draw_masks(shares, grid, SMALLEST, batch.rows, at.draw, batch.views[0].device)

        x, patches = self.student.embed(batch.views, masks.hidden)  # (V * B, D), (2 * B * N, D)
        s, s_patches = self.student.image_scores(x), self.student.patch_scores(patches[masks.rows])
        with torch.no_grad():
            y, patches = self.teacher.embed(batch.views[:2])
            t, t_patches = self.teacher.image_scores(y), self.teacher.patch_scores(patches[masks.rows])
        center, patch_center = self.centers(t, t_patches, tau_t)

        dino = H(t, s, match_views(t, s, images), center, tau_t, tau_s)
        ibot = H(t_patches, s_patches, masks.pairs, patch_center, tau_t, tau_s)
        # KoLeo is computed for each large crop alone, so that the two crops of an image do not repel each other.
        koleo = torch.stack([koleo_loss(view, batch.rows) for view in x[: 2 * images].chunk(2)]).sum()
        stats = assignment_stats(t, center, tau_t)
        if self.centering == "mean":
            self.update_centers(t, t_patches, batch.rows)
        loss = dino + ibot + self.koleo_weight * koleo
        return {"loss": loss, "view": dino, "patch": ibot, "koleo": koleo, **stats}

    def centers(self, t: Scores, t_patches: Scores, tau: float) -> tuple[Tensor, Tensor]:
        """Return the centres (K,) and (P,) of the teacher's scores of images and of hidden patches."""
        if self.centering == "mean":
            return self.center, self.patch_center
        return sinkhorn_center(t, tau, ITERATIONS), sinkhorn_center(t_patches, tau, ITERATIONS)

    def update_centers(self, t: Scores, t_patches: Scores, rows: tuple[int, ...]) -> None:
        """Move the two centres towards the mean scores, over all ranks, of images and of hidden patches."""
        update_center(self.center, t, rows, self.center_momentum)
        n = dist.total(t_patches.z.new_full((), len(t_patches.z), dtype=torch.float32)).clamp(min=1)
        self.patch_center.lerp_(mean_scores(t_patches.z, t_patches.w, n), 1 - self.center_momentum)

    def before_step(self, at: Progress) -> None:
        if at.epoch < self.freeze_last:
            drop_gradients(*self.student.prototypes)

    def after_step(self, at: Progress) -> None:
        ema_update(self.teacher, self.student, self.momentum(at))

    def export(self) -> Backbone:
        return self.teacher.backbone
