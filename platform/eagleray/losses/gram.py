"""Gram anchoring keeps the cosines between an image's patches close to those of an earlier teacher (DINOv3: Siméoni et
al. 2025, arXiv:2508.10104, section 4.2).

B images, N patches, D channels."""

import torch.nn.functional as F
from torch import Tensor

from eagleray.base.autocast import in_float32
from eagleray.losses.products import unit


@in_float32  # cosines near 1 differ little from the anchor's, and bfloat16 has steps of 1/256 there
def gram_loss(x: Tensor, anchor: Tensor, *, cut: bool = False) -> Tensor:
    """Return the mean squared difference between the cosines of patches x and of the anchor's patches, both (B, N, D).

    The cosines are of all pairs of patches within an image. Equation 2 has a sum of squares instead of the mean. With
    `cut`, cosines below 0 count as 0, which is the default of the authors' class, but not the setting of the paper."""
    ours, theirs = gram(x), gram(anchor)
    return F.mse_loss(ours.relu(), theirs.relu()) if cut else F.mse_loss(ours, theirs)


def gram(x: Tensor) -> Tensor:
    """Return the cosines (B, N, N) of the angles between the patches (B, N, D) of each image."""
    x = unit(x)
    return x @ x.mT


@in_float32
def resized(patches: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """Resample patches (B, N, D) from a grid `old` to a grid `new`, bicubic without antialiasing (section 4.3)."""
    if old == new:
        return patches
    grid = F.interpolate(patches.mT.unflatten(2, old), size=new, mode="bicubic")
    return grid.flatten(2).mT
