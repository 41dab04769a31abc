"""Finds conditions for `data.train.where` that leave out copies, outliers and damaged, dark, blurred or tiny images."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eagleray.data.columns import samples_where
from eagleray.data.index import Index
from eagleray.data.sample_table import SampleTable

# Expressions that are true for images to keep. An image that several of them leave out counts only for the first.
CUTS = {
    "damaged": "width is not null",
    "near copies": "duplicate_of is null",
    "dark": "luma_p99 >= 60",
    "blurred": "sharpness >= 20",
    "tiny": "min_side >= 64",
}
OUTLIERS = 0.01  # share of outliers, the images least similar to their cluster's centre, of those that CUTS keep
MOST = 0.2  # a cut that leaves out a larger share of images is not made, unless they are damaged or near copies


@dataclass(frozen=True)
class Cut:
    """A rule that leaves out samples: `where` is true for samples to keep, and `out` (N,) for those that this cut
    leaves out and no earlier one does. `made` is false for a cut that leaves out too many."""

    name: str
    where: str
    out: NDArray[np.bool_]
    made: bool

    def line(self) -> str:
        """Return how many images the cut leaves out."""
        said = f"{int(self.out.sum()):,} ({self.out.mean():.2%})"
        return (
            f"{self.name}: {said} left out by {self.where}"
            if self.made
            else (f"{self.name}: {said} would be left out by {self.where}, so this cut is not made")
        )


def find_cuts(index: Index, url: str, clusters: SampleTable) -> Iterator[Cut]:
    """Yield a Cut for each rule in CUTS and one for outliers. Each looks only at samples that earlier cuts keep.
    `clusters` has the columns of `eagleray data cluster`. Raises UserError where a column is missing."""
    left = np.ones(len(index), bool)
    for name, where in CUTS.items():
        cut = cut_of(name, where, left & ~kept(index, url, where))
        left &= ~cut.out | (not cut.made)
        yield cut
    near = column(clusters, "centre_similarity")
    least = np.floor(1e4 * np.nanquantile(near[left], OUTLIERS)) / 1e4 if left.any() else 0.0
    yield cut_of("outliers", f"centre_similarity >= {least:g}", left & ~(near >= np.float32(least)))


def cut_of(name: str, where: str, out: NDArray[np.bool_]) -> Cut:
    """Return the cut that leaves out the samples `out` (N,). It is not made if they are too many, see MOST."""
    return Cut(name, where, out, bool(out.mean() <= MOST or name in ("damaged", "near copies")))


def kept(index: Index, url: str, where: str) -> NDArray[np.bool_]:
    """Return whether an expression is true for each sample (N,)."""
    return np.concatenate([chosen for chosen, _ in samples_where(index, url, where, "")])


def column(table: SampleTable, name: str) -> NDArray[np.float32]:
    """Return a column of numbers (N,), nan where a sample has none."""
    parts = [table.read(part, [name])[name].to_numpy() for part in table.parts]
    return np.concatenate(parts).astype(np.float32)
