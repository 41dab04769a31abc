"""iBOT adds to DINO the prediction of the prototypes that the teacher assigns to hidden patches (Zhou et al. 2022,
arXiv:2111.07832, algorithm 1).

Where the paper leaves a choice open, this follows the authors' code. B images, V views, N patches of a large crop, n
hidden patches, K prototypes of images, P prototypes of patches, D channels."""

from collections.abc import Sequence
from functools import partial

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor

from eagleray.config.schedule import Progress, Schedule
from eagleray.config.types import Share, Temperature
from eagleray.data.batch import Batch
from eagleray.losses.masked import MaskedEncoder, draw_masks, independent_shares
from eagleray.losses.prototypes import H, assignment_stats, match_views, update_center
from eagleray.methods.method import Method
from eagleray.models.backbone import Backbone
from eagleray.models.ema import ema_copy, ema_update
from eagleray.models.heads import PrototypeHead, drop_gradients


class IBOT(Method):
    """The student sees all views, the first two with hidden patches; the teacher sees these two with all patches."""

    views = (2, 100)
    shardable = True
    center: Tensor  # (K,)
    patch_center: Tensor  # (P,)

    def __init__(
        self,
        backbone: Backbone,
        *,
        prototypes: PositiveInt = 8192,
        patch_prototypes: PositiveInt | None = None,  # prototypes of a head for patches; None: the images' head
        hidden: PositiveInt = 2048,
        bottleneck: PositiveInt = 256,
        free_scale: bool = False,  # train the prototypes' lengths: the authors do so for ViT-S, but not for ViT-B
        mask_probability: Share = 0.5,  # the probability that a large crop has hidden patches
        mask_ratio: tuple[Share, Share] = (0.1, 0.5),  # range of the share of a crop's patches that are hidden
        student_temp: PositiveFloat = 0.1,
        teacher_temp: Temperature = Schedule(value=0.07, warmup_from=0.04, warmup=30, inclusive=True, per_epoch=True),
        momentum: Schedule = Schedule(value=0.996, end=1.0),
        center_momentum: Share = 0.9,
        freeze_last: float = 1.0,  # number of first epochs in which the prototypes are not trained
    ) -> None:
        super().__init__()
        self.mask_probability, self.mask_ratio = mask_probability, mask_ratio
        self.student_temp, self.teacher_temp = student_temp, teacher_temp
        self.momentum, self.center_momentum, self.freeze_last = momentum, center_momentum, freeze_last
        make = partial(PrototypeHead, backbone.dim, hidden=hidden, bottleneck=bottleneck, free_scale=free_scale)
        patch_head = make(patch_prototypes) if patch_prototypes else None
        self.student = MaskedEncoder(backbone, make(prototypes), patch_head)
        self.teacher = ema_copy(self.student)
        self.register_buffer("center", torch.zeros(prototypes))
        self.register_buffer("patch_center", torch.zeros(patch_prototypes or prototypes))

    def check_views(self, views: Sequence[Tensor]) -> None:
        self.student.check_views(views, self.mask_ratio)

    def forward(self, batch: Batch, at: Progress) -> dict[str, Tensor]:
        grid, tau_t, tau_s = self.student.backbone.patch_grid(batch.views[0]), self.teacher_temp(at), self.student_temp
        shares = independent_shares(sum(batch.rows), self.mask_probability, self.mask_ratio, at.draw)
        smallest = (min(grid) // 3) ** 2  # fewest patches in a masked block, as in the authors' code
        masks = draw_masks(shares, grid, smallest, batch.rows, at.draw, batch.views[0].device)

        u, patches = self.student.embed(batch.views, masks.hidden)  # (V * B, D), (2 * B * N, D)
        s, s_patches = self.student.image_scores(u), self.student.patch_scores(patches[masks.rows])
        with torch.no_grad():
            v, patches = self.teacher.embed(batch.views[:2])
            t, t_patches = self.teacher.image_scores(v), self.teacher.patch_scores(patches)

        l_cls = H(t, s, match_views(t, s, len(batch.views[0])), self.center, tau_t, tau_s)
        t_hidden = t_patches._replace(z=t_patches.z[masks.rows])
        l_mim = H(t_hidden, s_patches, masks.pairs, self.patch_center, tau_t, tau_s)
        stats = assignment_stats(t, self.center, tau_t)
        # The loss above uses the previous centres. The patches' new centre is a mean over all patches, hidden or not.
        update_center(self.center, t, batch.rows, self.center_momentum)
        update_center(self.patch_center, t_patches, batch.rows, self.center_momentum)
        return {"loss": l_cls + l_mim, "view": l_cls, "patch": l_mim, **stats}

    def before_step(self, at: Progress) -> None:
        if at.epoch < self.freeze_last:
            drop_gradients(*self.student.prototypes)

    def after_step(self, at: Progress) -> None:
        ema_update(self.teacher, self.student, self.momentum(at))

    def export(self) -> Backbone:
        return self.teacher.backbone
