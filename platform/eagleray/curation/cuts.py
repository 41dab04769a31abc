"""Leaves out copies, outliers and damaged, dark, blurred or tiny images, by expressions of `data.train.where`."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eagleray.data.columns import samples_where
from eagleray.data.index import Index
from eagleray.data.sample_table import SampleTable

# In this order: an image counts for the first one that leaves it out. Each expression says what is kept.
CUTS = {
    "damaged": "width is not null",
    "near copies": "duplicate_of is null",
    "dark": "luma_p99 >= 60",
    "blurred": "sharpness >= 20",
    "tiny": "min_side >= 64",
}
OUTLIERS = 0.01  # share of the images left that are least similar to the centres of their clusters
MOST = 0.2  # share of all images above which a cut does not fit this data, and is not made


@dataclass(frozen=True)
class Cut:
    """An expression that says what is kept, and which samples it leaves out that those before it keep (N,). A cut that
    does not fit the data is not made."""

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
    """Yield all cuts. `clusters` has the columns of `eagleray data cluster`. Raises UserError where a column is
    missing."""
    left = np.ones(len(index), bool)
    for name, where in CUTS.items():
        cut = cut_of(name, where, left & ~kept(index, url, where))
        left &= ~cut.out | (not cut.made)
        yield cut
    near = column(clusters, "centre_similarity")
    least = np.floor(1e4 * np.nanquantile(near[left], OUTLIERS)) / 1e4 if left.any() else 0.0
    yield cut_of("outliers", f"centre_similarity >= {least:g}", left & ~(near >= np.float32(least)))


def cut_of(name: str, where: str, out: NDArray[np.bool_]) -> Cut:
    """Return a cut that leaves out some samples (N,)."""
    return Cut(name, where, out, bool(out.mean() <= MOST or name in ("damaged", "near copies")))


def kept(index: Index, url: str, where: str) -> NDArray[np.bool_]:
    """Return for which samples an expression is true (N,)."""
    return np.concatenate([chosen for chosen, _ in samples_where(index, url, where, "")])


def column(table: SampleTable, name: str) -> NDArray[np.float32]:
    """Return a column of numbers (N,), nan where a sample has none."""
    parts = [table.read(part, [name])[name].to_numpy() for part in table.parts]
    return np.concatenate(parts).astype(np.float32)
