"""Defines the batch that the loader passes to a method."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of a global batch that one of W ranks trains on: B images in V views, in the order of the recipe's
    views."""

    views: list[Tensor]  # V x (B, 3, H, W), normalised
    index: Tensor  # (B,) position in the dataset
    label: Tensor  # (B,) class, -1 where there is none
    rows: tuple[int, ...]  # W: B of every rank, in rank order
