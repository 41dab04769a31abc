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
    index: Tensor  # (B,) position of each image in the data set
    label: Tensor  # (B,) class of each image, or -1 if it has no label
    rows: tuple[int, ...]  # (W,) number of images B of each rank
    # (V, B, 4) x and y of each view's upper left and lower right corner in its image, as fractions of the image's width
    # and height. In a flipped view, the first x is the larger one. None unless the method sets `needs_boxes`.
    boxes: Tensor | None = None


def whole_boxes(views: Sequence[Tensor]) -> Tensor:
    """Return `Batch.boxes` (V, B, 4) for V `views` (B, 3, S, S), each of which shows a whole synthetic image."""
    return torch.tensor([0.0, 0.0, 1.0, 1.0], device=views[0].device).expand(len(views), len(views[0]), 4)
