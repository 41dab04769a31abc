"""Defines the batch that the loader passes to a method."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """The part of a global batch that one of W ranks trains on: B images in V views, in the order of the recipe's
    views."""

    views: list[Tensor]  # V x (B, 3, H, W), normalised
    index: Tensor  # (B,) position in the dataset
    label: Tensor  # (B,) class, -1 where there is none
    rows: tuple[int, ...]  # W: B of every rank, in rank order
    # (V, B, 4) x and y of the image at the view's upper left and lower right corner, as shares of its width and height;
    # in a flipped view the first x is the larger one. None: the method has no `needs_boxes`.
    boxes: Tensor | None = None


def whole_boxes(views: Sequence[Tensor]) -> Tensor:
    """Return the boxes (V, B, 4) of V views (B, 3, S, S) that show whole images, for batches of made-up pixels."""
    return torch.tensor([0.0, 0.0, 1.0, 1.0], device=views[0].device).expand(len(views), len(views[0]), 4)
