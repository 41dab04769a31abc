"""Smaller views in the first part of the training, as in FastDINOv2 (Zhang et al. 2025, arXiv:2507.03779)."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass

from eagleray.base.errors import UserError
from eagleray.config import STRICT
from eagleray.config.view import View


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Phase:
    """An early part of the training, in which views are smaller."""

    until: Annotated[float, Field(gt=0, lt=1)]  # share of the epochs after which it ends; rounded to whole epochs
    sizes: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]  # pixels, one for each entry of `views`


def phases(views: Sequence[View], curriculum: Sequence[Phase], epochs: int) -> tuple[tuple[int, tuple[View, ...]], ...]:
    """Return the views of every phase of a training, each after the epoch before which it ends.

    The last phase has the views as they are stated. A phase changes only their sizes. Raises UserError when a phase has
    no epoch, or when its sizes do not fit the views.
    """
    out: list[tuple[int, tuple[View, ...]]] = []
    ends = [0, *(round(phase.until * epochs) for phase in curriculum)]
    for i, (phase, (begin, end)) in enumerate(zip(curriculum, itertools.pairwise(ends), strict=True)):
        key = f"curriculum.{i}"
        if not begin < end < epochs:
            raise UserError(
                f"{key}.until={phase.until:g}: is epoch {end} of optim.epochs={epochs}; expected one after {begin} and "
                f"before {epochs}, so that every phase has an epoch"
            )
        if len(phase.sizes) != len(views):
            raise UserError(
                f"{key}.sizes={list(phase.sizes)}: expected {len(views)} sizes, one for each entry of views"
            )
        smaller = {view.size: size for view, size in zip(views, phase.sizes, strict=True)}
        for j, (size, view) in enumerate(zip(phase.sizes, views, strict=True)):
            if size > view.size:
                raise UserError(f"{key}.sizes: {size} pixels are more than the {view.size} of views.{j}.size")
            if size != smaller[view.size]:  # methods compare views of one size with each other
                raise UserError(
                    f"{key}.sizes: {size} and {smaller[view.size]} pixels for views of one size, {view.size}; expected "
                    "one size for all of them"
                )
        if len(set(smaller.values())) < len(smaller):  # methods tell global from local views by their sizes
            raise UserError(
                f"{key}.sizes={list(phase.sizes)}: one size for views of {', '.join(map(str, smaller))} pixels; "
                "expected different sizes for them"
            )
        out.append((end, tuple(replace(view, size=size) for view, size in zip(views, phase.sizes, strict=True))))
    return (*out, (epochs, tuple(views)))
