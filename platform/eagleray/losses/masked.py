"""Masked image modelling: a student predicts its teacher's outputs for patches that are hidden from the student.

This is part of iBOT (Zhou et al. 2022, arXiv:2111.07832), DINOv2 (Oquab et al. 2023, arXiv:2304.07193) and DINOv3.
Blocks of patches are hidden as in BEiT (Bao et al. 2021, arXiv:2106.08254, algorithm 1). B images on this rank, V views
of which the first two are masked, a grid of h x w = N patches, n hidden patches in all, D channels."""

import math
from collections.abc import Sequence
from itertools import groupby
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from eagleray.base import devices, dist
from eagleray.base.errors import UserError
from eagleray.losses.prototypes import Match, Scores, check_large_crops
from eagleray.models.backbone import Backbone, Encoder
from eagleray.models.heads import PrototypeHead
from eagleray.models.rotary import rotary
from eagleray.models.tokens import Hidden, maskable

TRIES, ASPECT = 10, 0.3  # most tries to place a block, and its least aspect ratio (code of BEiT, iBOT and DINOv2)

Shares = NDArray[np.float64]  # (2, images of all ranks) share of the patches of each large crop that are to be hidden


class Masks(NamedTuple):
    """The patches of the first two views that are hidden from the student."""

    hidden: Tensor  # (2 * B, h, w) view-major, true for a hidden patch
    rows: Tensor  # (n,) indices of the hidden patches among the 2 * B * N patches
    pairs: Match  # each hidden patch with the teacher's; weighted for a mean over a crop's patches, then over crops


def independent_shares(images: int, probability: float, bounds: tuple[float, float], seed: int) -> Shares:
    """Draw iBOT's shares of hidden patches, one per crop: uniform in `bounds` with `probability`, otherwise zero."""
    draw = np.random.default_rng(seed).random((2, 2, images))
    return np.where(draw[0] < probability, bounds[0] + draw[1] * (bounds[1] - bounds[0]), 0.0)


def stratified_shares(
    images: int, probability: float, bounds: tuple[float, float], seed: int, *, upper: bool = False
) -> Shares:
    """Draw DINOv2's shares of hidden patches, which are above zero for exactly the share `probability` of all crops.

    The range `bounds` is divided into one equal interval for each of these crops. The crop's share is drawn from its
    interval or, with `upper`, as in DINOv3, is the upper end of the interval."""
    generator = np.random.default_rng(seed)
    order, masked = generator.permutation(2 * images), int(2 * images * probability)
    part = (order + (1 if upper else generator.random(2 * images))) / max(masked, 1)
    return np.where(order < masked, bounds[0] + part * (bounds[1] - bounds[0]), 0.0).reshape(2, images)


def draw_masks(
    shares: Shares,
    grid: tuple[int, int],
    smallest: int,
    rows: tuple[int, ...],
    seed: int,
    device: torch.device,
    *,
    exact: bool = False,
) -> Masks:
    """Draw which patches of this rank's crops are hidden, in blocks of at least `smallest` patches.

    If the last blocks do not fit, fewer patches are hidden than `shares` demand, unless `exact` adds single patches. A
    mask depends only on the seed and the image's position in the batch of all ranks, so it is the same for any number
    of ranks and after a restart. As the host draws it, the host knows n without waiting for the device."""
    first, patches = dist.offset(rows), grid[0] * grid[1]
    mine = shares[:, first : first + rows[dist.rank()]]
    hidden = np.stack(
        [
            block_mask(Random(f"{seed} {view} {first + i}"), grid, int(share * patches), smallest, exact=exact)
            for view, crops in enumerate(mine)
            for i, share in enumerate(crops)
        ]
    )
    return masks_of(hidden, device)


def masks_of(hidden: NDArray[np.bool_], device: torch.device) -> Masks:
    """Return the Masks of `hidden` (2 * B, h, w), true for hidden patches, on a device without waiting for the copy."""
    counts = hidden.sum((1, 2))
    weight = np.repeat(1 / np.maximum(counts, 1) / len(counts), counts).astype(np.float32)
    at, rows, weights = (_on_device(x, device) for x in (hidden, np.flatnonzero(hidden), weight))
    return Masks(at, rows, Match(torch.arange(len(rows), device=device).unsqueeze(1), weights))


def block_mask(
    random: Random, grid: tuple[int, int], patches: int, smallest: int, *, exact: bool = False
) -> NDArray[np.bool_]:
    """Return a mask (h, w) that hides `patches` patches in blocks. If the last blocks do not fit, it hides fewer
    patches, unless `exact` adds single patches."""
    h, w = grid
    mask, left, tries = np.zeros(grid, bool), patches, 0
    while left > 0 and tries < TRIES:
        tries += 1
        area, aspect = random.uniform(smallest, left), math.exp(random.uniform(math.log(ASPECT), -math.log(ASPECT)))
        height, width = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if not (height < h and width < w):
            continue
        top, start = random.randrange(h - height + 1), random.randrange(w - width + 1)
        block = mask[top : top + height, start : start + width]
        new = block.size - int(block.sum())
        if 0 < new <= left:
            block[:] = True
            left, tries = left - new, 0
    if exact and left > 0:
        mask.flat[random.sample(np.flatnonzero(~mask).tolist(), left)] = True
    return mask


def _on_device(x: NDArray[Any], device: torch.device) -> Tensor:
    on_host = torch.from_numpy(x)
    return (on_host.pin_memory() if devices.has_streams(device) else on_host).to(device, non_blocking=True)


class MaskedEncoder(Encoder[PrototypeHead]):
    """An encoder with a head for images and one for patches, and a learned token in place of hidden patches.

    Raises UserError for a backbone whose patches cannot be hidden."""

    def __init__(self, backbone: Backbone, head: PrototypeHead, patch_head: PrototypeHead | None) -> None:
        """Without a `patch_head`, patches share the head of images."""
        super().__init__(backbone, head)
        if not (maskable(backbone.model) or rotary(backbone.model)):
            raise UserError(
                "backbone.name: expected a plain vision transformer of timm, whose patches can be hidden, or a DINOv3 "
                f"one, got {type(backbone.model).__name__}"
            )
        self.patch_head = patch_head
        self.mask_token = nn.Parameter(torch.zeros(1, backbone.dim))

    def embed(self, views: Sequence[Tensor], hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the pooled vectors (V * B, D) of V views (B, 3, S, S) and the patches (2 * B * N, D) of the first two.

        `hidden` (2 * B, h, w) is true for patches of the first two views that the mask token replaces."""
        parts = groupby(enumerate(views), key=lambda view: (view[0] < 2, view[1].shape))
        images = [torch.cat([x for _, x in part]) for _, part in parts]
        outs = self.backbone.sizes(images, None if hidden is None else Hidden(hidden, self.mask_token))
        return torch.cat([out.pooled for out in outs]), outs[0].patches.flatten(0, 1)

    def image_scores(self, pooled: Tensor) -> Scores:
        """Return the prototype scores of images with pooled vectors (n, D)."""
        return Scores(self.head(pooled), self.head.last.weight)

    def patch_scores(self, patches: Tensor) -> Scores:
        """Return the prototype scores of patches (n, D) from the patch head or, if there is none, the images' head."""
        head = self.patch_head or self.head
        return Scores(head(patches), head.last.weight)

    @property
    def prototypes(self) -> list[nn.Module]:
        """The last layers of the heads, whose weights are the prototypes."""
        return [self.head.last] if self.patch_head is None else [self.head.last, self.patch_head.last]

    def check_views(self, views: Sequence[Tensor], bounds: tuple[float, float]) -> None:
        """Raises UserError when the two large crops differ in size, or the `bounds` of the mask ratio are wrong.

        Bounds are wrong if the first is above the second, or if the second is too small to hide a single patch."""
        check_large_crops(views)
        if bounds[0] > bounds[1]:
            raise UserError(f"method.mask_ratio={list(bounds)}: expected the smaller number first")
        patches = math.prod(self.backbone.patch_grid(views[0]))
        if int(bounds[1] * patches) < 1:
            raise UserError(f"method.mask_ratio={list(bounds)}: hides none of the {patches} patches of a large crop")
