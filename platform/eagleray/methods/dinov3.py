"""DINOv3 trains as DINOv2 and later anchors the similarities of patches to an earlier teacher (Siméoni et al. 2025,
arXiv:2508.10104, sections 3.2, 4.2 and 5.1).

Where the paper leaves a choice open, this follows the authors' code. B images, V views (without the Gram teacher's), N
patches of a large crop, n hidden patches, K prototypes of images, P prototypes of patches, D channels."""

from collections.abc import Sequence
from functools import partial

import torch
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor

from eagleray.base.errors import UserError
from eagleray.config.schedule import Progress, Schedule
from eagleray.config.types import Share, Temperature
from eagleray.config.view import View
from eagleray.data.batch import Batch
from eagleray.losses.gram import gram_loss, resized
from eagleray.losses.koleo import koleo_loss
from eagleray.losses.masked import MaskedEncoder, draw_masks, stratified_shares
from eagleray.losses.prototypes import H, assignment_stats, match_views
from eagleray.losses.sinkhorn import sinkhorn_center
from eagleray.methods.method import Method
from eagleray.models.backbone import Backbone
from eagleray.models.ema import ema_copy, ema_update, sharing_copy
from eagleray.models.heads import PrototypeHead, drop_gradients

ITERATIONS, SMALLEST = 3, 4  # rounds of Sinkhorn-Knopp, and fewest patches in a masked block, as in the authors' code


class DINOv3(Method):
    """The student sees the small crops and, with hidden patches, the large ones; the teacher sees the large crops.

    The Gram teacher sees the large crops too, or views of the same crops at another resolution."""

    views = (2, 100)

    def __init__(
        self,
        backbone: Backbone,
        *,
        prototypes: PositiveInt = 262144,
        patch_prototypes: PositiveInt = 98304,
        hidden: PositiveInt = 8192,
        patch_hidden: PositiveInt = 4096,
        bottleneck: PositiveInt = 512,
        patch_bottleneck: PositiveInt = 384,  # bottleneck of the head for patches
        mask_probability: Share = 0.5,  # share of the large crops in which patches are hidden
        mask_ratio: tuple[Share, Share] = (0.1, 0.5),  # range of the share of a crop's patches that are hidden
        koleo_weight: NonNegativeFloat = 0.1,
        koleo_group: PositiveInt = 16,  # consecutive images among which KoLeo seeks nearest neighbours
        student_temp: PositiveFloat = 0.1,
        teacher_temp: Temperature = Schedule(value=0.07, warmup_from=0.04, warmup=100),
        momentum: Schedule = Schedule(value=0.994),
        freeze_last: float = 5.0,  # number of first epochs in which the prototypes are not trained
        gram_start: NonNegativeFloat | None = None,  # epoch from which patches are anchored; None: never
        # Number of epochs after which the teacher becomes the first Gram teacher; None: gram_start
        gram_teacher: NonNegativeFloat | None = None,
        gram_every: PositiveFloat = 10.0,  # epochs between Gram teachers, from gram_start on
        gram_refreshes: NonNegativeInt = 3,  # number of times that the teacher replaces the Gram teacher
        gram_weight: NonNegativeFloat = 2.0,  # weight of the loss that anchors patches
        gram_cut: bool = False,  # cosines below 0 count as 0
        small_weight: NonNegativeFloat = 0.5,  # weight of the small crops from gram_start on; it is 1 before
    ) -> None:
        super().__init__()
        self.mask_probability, self.mask_ratio = mask_probability, mask_ratio
        self.koleo_weight, self.koleo_group = koleo_weight, koleo_group
        self.student_temp, self.teacher_temp = student_temp, teacher_temp
        self.momentum, self.freeze_last = momentum, freeze_last
        self.gram_start, self.gram_weight, self.gram_cut = gram_start, gram_weight, gram_cut
        self.small_weight = small_weight
        make = partial(PrototypeHead, backbone.dim, free_scale=True)
        head = make(prototypes, hidden=hidden, bottleneck=bottleneck)
        patch_head = make(patch_prototypes, hidden=patch_hidden, bottleneck=patch_bottleneck)
        self.student = MaskedEncoder(backbone, head, patch_head)
        self.teacher = ema_copy(self.student)
        self.gram = None if gram_start is None else sharing_copy(self.teacher.backbone)
        self.copied: list[float] = []  # epochs after which the Gram teacher becomes a copy of the teacher
        if gram_start is not None:
            first = gram_start if gram_teacher is None else gram_teacher
            if first > gram_start:
                raise UserError(f"method.gram_teacher={first:g}: expected at most method.gram_start={gram_start:g}")
            self.copied = [first, *(gram_start + gram_every * (i + 1) for i in range(gram_refreshes))]

    def crops(self, views: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]:
        """Return the large crops, the Gram teacher's views of these crops, and the small crops.

        If the second view has another size than the first, each large crop is followed by the Gram teacher's view of
        it; otherwise the Gram teacher sees the large crops themselves."""
        if self.gram is None or len(views) < 4 or views[0].shape == views[1].shape:
            return views[:2], views[:2], views[2:]
        return views[:4:2], views[1:4:2], views[4:]

    def check_views(self, views: Sequence[Tensor]) -> None:
        large, sharp, _ = self.crops(views)
        self.student.check_views(large, self.mask_ratio)
        if sharp[0].shape != sharp[1].shape:
            raise UserError("views: the second and the fourth, those of the Gram teacher, are not of one size")

    def check_crops(self, views: Sequence[View]) -> None:
        if self.gram is None or len(views) < 4 or views[0].size == views[1].size:
            return
        for i, (large, sharp) in enumerate(zip(views[:4:2], views[1:4:2], strict=True)):
            if not sharp.same_crop or large.flip or sharp.flip or large.moving or sharp.moving:
                raise UserError(
                    f"views: number {2 * i + 2} is the Gram teacher's view of number {2 * i + 1}, and shows the same "
                    "places: expected same_crop=true, and in both flip=0 and nothing that moves pixels"
                )

    def forward(self, batch: Batch, at: Progress) -> dict[str, Tensor]:
        large, sharp, small = self.crops(batch.views)
        images, tau_t, tau_s = len(large[0]), self.teacher_temp(at), self.student_temp
        grid = self.student.backbone.patch_grid(large[0])
        shares = stratified_shares(sum(batch.rows), self.mask_probability, self.mask_ratio, at.draw, upper=True)
        masks = draw_masks(shares, grid, SMALLEST, batch.rows, at.draw, large[0].device, exact=True)

        x, x_patches = self.student.embed([*large, *small], masks.hidden)  # (V * B, D), (2 * B * N, D)
        s, s_patches = self.student.image_scores(x), self.student.patch_scores(x_patches[masks.rows])
        with torch.no_grad():
            y, y_patches = self.teacher.embed(large)
            t, t_patches = self.teacher.image_scores(y), self.teacher.patch_scores(y_patches[masks.rows])
        center, patch_center = (sinkhorn_center(z, tau_t, ITERATIONS) for z in (t, t_patches))

        anchored, pairs = self.anchored(at), match_views(t, s, images)
        if anchored:
            pairs.weight[2 * images :] *= self.small_weight
        dino = H(t, s, pairs, center, tau_t, tau_s)
        ibot = H(t_patches, s_patches, masks.pairs, patch_center, tau_t, tau_s)
        koleo = torch.stack([koleo_loss(v, batch.rows, self.koleo_group) for v in x[: 2 * images].chunk(2)]).sum()
        out = {"loss": dino + ibot + self.koleo_weight * koleo, "view": dino, "patch": ibot, "koleo": koleo}
        if self.gram is not None:
            out["gram"] = torch.zeros_like(dino)
            if anchored:
                out["gram"] = self.gram_of(x_patches.unflatten(0, (2 * images, -1)), sharp, grid)
                out["loss"] = out["loss"] + self.gram_weight * out["gram"]
        return out | assignment_stats(t, center, tau_t)

    def anchored(self, at: Progress) -> bool:
        """Return whether this step adds the Gram loss."""
        return self.gram_start is not None and at.step >= round(self.gram_start * at.steps_per_epoch)

    def gram_of(self, patches: Tensor, views: Sequence[Tensor], grid: tuple[int, int]) -> Tensor:
        """Return the Gram loss between the student's `patches` (2 * B, N, D), hidden patches included, and the Gram
        teacher's patches of `views`, resampled to the student's `grid` (h, w)."""
        assert self.gram is not None
        with torch.no_grad():
            seen = self.gram.each(views)
            anchor = torch.cat([resized(view.patches, view.grid, grid) for view in seen])
        return gram_loss(patches, anchor, cut=self.gram_cut)

    def before_step(self, at: Progress) -> None:
        if at.epoch < self.freeze_last:
            drop_gradients(*self.student.prototypes)

    def after_step(self, at: Progress) -> None:
        ema_update(self.teacher, self.student, self.momentum(at))
        if self.gram is not None and at.step + 1 in (round(epoch * at.steps_per_epoch) for epoch in self.copied):
            ema_update(self.gram, self.teacher.backbone, 0.0)

    def export(self) -> Backbone:
        return self.teacher.backbone
