"""What the loader hands to a method."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """One global step's share for this rank. B images, V views in the order of the recipe, W ranks."""

    views: list[Tensor]  # V x (B, 3, H, W), normalised
    boxes: Tensor  # (V, B, 4) crop corners x0 y0 x1 y1 in the source image, 0 to 1; x0 > x1 in a mirrored view
    index: Tensor  # (B,) position in the dataset
    label: Tensor  # (B,) class, -1 where there is none
    rows: tuple[int, ...]  # W: B of every rank, in rank order
