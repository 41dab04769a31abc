"""Defines the batch that the loader passes to a method."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """One rank's share of a global batch: B images in V views, in the order of the recipe, on one of W ranks."""

    views: list[Tensor]  # V x (B, 3, H, W), normalised
    index: Tensor  # (B,) position in the dataset
    label: Tensor  # (B,) class, -1 where there is none
    rows: tuple[int, ...]  # W: B of every rank, in rank order
