"""Makes steps in the first part of training cheaper: views are smaller, or a ViT sees only some of their patches.

FastDINOv2 (Zhang et al. 2025, arXiv:2507.03779) uses smaller views, PatchDropout (Liu et al. 2022, arXiv:2208.07220)
fewer patches."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, NamedTuple

from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass

from eagleray.base.errors import UserError
from eagleray.config import STRICT
from eagleray.config.view import View


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Phase:
    """An early part of the training, in which views are smaller or have fewer patches."""

    until: Annotated[float, Field(gt=0, lt=1)]  # share of the epochs after which a phase ends, rounded to epochs
    # Sizes in pixels, one for each entry of `views` and at most its `size`; none: the sizes of the views
    sizes: tuple[PositiveInt, ...] = ()
    # Share of a view's patches, drawn anew in each step, that a trained ViT processes; momentum copies process all
    keep: Annotated[float, Field(gt=0, le=1)] = 1.0

    def __post_init__(self) -> None:
        if not self.sizes and self.keep == 1:
            raise ValueError("expected sizes, keep, or both")


class PhaseViews(NamedTuple):
    """The views of a phase, and the share of their patches that a trained ViT sees."""

    until: int  # epoch at whose start the phase is over
    views: tuple[View, ...]
    keep: float  # share of each view's patches that a trained ViT sees

    def __str__(self) -> str:
        sizes = ", ".join(str(view.size) for view in self.views)
        return f"views of {sizes} pixels" + (f", {self.keep:g} of their patches" if self.keep < 1 else "")


def phases(views: Sequence[View], curriculum: Sequence[Phase], epochs: int) -> tuple[PhaseViews, ...]:
    """Return the views of every phase of a training, and the share of their patches that a trained ViT sees.

    Phases differ only in the size of views and in this share. The last phase has `views` unchanged and all patches.
    Raises UserError when a phase has no epoch, or when its sizes do not fit the views."""
    out: list[PhaseViews] = []
    ends = [0, *(round(phase.until * epochs) for phase in curriculum)]
    for i, (phase, (begin, end)) in enumerate(zip(curriculum, itertools.pairwise(ends), strict=True)):
        key = f"curriculum.{i}"
        if not begin < end < epochs:
            raise UserError(
                f"{key}.until={phase.until:g}: is epoch {end} of optim.epochs={epochs}; expected one after {begin} and "
                f"before {epochs}, so that every phase has an epoch"
            )
        if not phase.sizes:
            out.append(PhaseViews(end, tuple(views), phase.keep))
            continue
        if len(phase.sizes) != len(views):
            raise UserError(
                f"{key}.sizes={list(phase.sizes)}: expected {len(views)} sizes, one for each entry of views"
            )
        smaller = {view.size: size for view, size in zip(views, phase.sizes, strict=True)}
        for j, (size, view) in enumerate(zip(phase.sizes, views, strict=True)):
            if size > view.size:
                raise UserError(f"{key}.sizes: {size} pixels are more than the {view.size} of views.{j}.size")
            if size != smaller[view.size]:  # equal sizes stay equal, as methods compare such views
                raise UserError(
                    f"{key}.sizes: {size} and {smaller[view.size]} pixels for views of one size, {view.size}; expected "
                    "one size for all of them"
                )
        if len(set(smaller.values())) < len(smaller):  # methods tell global from local views by size
            raise UserError(
                f"{key}.sizes={list(phase.sizes)}: one size for views of {', '.join(map(str, smaller))} pixels; "
                "expected different sizes for them"
            )
        resized = tuple(replace(view, size=size) for view, size in zip(views, phase.sizes, strict=True))
        out.append(PhaseViews(end, resized, phase.keep))
    return (*out, PhaseViews(epochs, tuple(views), 1.0))
