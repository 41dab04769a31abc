"""Defines the batch that the loader passes to a method."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """The part of a global batch that one of W ranks trains on: B images in V views, in the order of the recipe's
    views."""

    views: list[Tensor]  # V tensors (B, 3, H, W), normalised
    index: Tensor  # (B,) position in the data set
    label: Tensor  # (B,) class, or -1 without one
    rows: tuple[int, ...]  # B of each of the W ranks, in the order of ranks
    # (V, B, 4) x and y of the image at the view's upper left and lower right corner, as shares of its width and height.
    # In a flipped view the first x is the larger one. None if the method has no `needs_boxes`.
    boxes: Tensor | None = None


def whole_boxes(views: Sequence[Tensor]) -> Tensor:
    """Return the boxes (V, B, 4) of V views (B, 3, S, S) that show whole images, for batches of synthetic pixels."""
    return torch.tensor([0.0, 0.0, 1.0, 1.0], device=views[0].device).expand(len(views), len(views[0]), 4)
