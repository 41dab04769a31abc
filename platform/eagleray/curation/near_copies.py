"""Finds samples whose features are nearly those of another one, within clusters.

As in SemDeDup (arXiv 2303.09540), only samples of one cluster are compared, by the cosine similarity of their features.
Of near copies the largest file stays here, where the paper keeps what is farthest from the centre.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

PIECE = 1024  # rows that are compared with others at once
OTHERS = 2**16  # how many of those others are compared at a time


@dataclass(frozen=True)
class Likeness:
    """The features of the samples of a cluster (n, D), of length 1, and the bits of their hashes as -1 and 1 (n, 64):
    where these count, samples whose hashes differ in more than `bits` of them are nothing like each other."""

    x: Tensor
    signs: Tensor | None = None
    bits: int = 64

    def between(self, rows: Tensor, others: Tensor) -> Tensor:
        """Return the cosine similarities of some rows to others (r, o), -1 where their hashes differ too much."""
        out = self.x[rows] @ self.x[others].T
        if self.signs is not None:
            alike = self.signs[rows] @ self.signs[others].T
            out = out.masked_fill(alike < self.signs.shape[1] - 2 * self.bits, -1.0)
        return out


def near_copies(of: Likeness, threshold: float) -> tuple[Tensor, Tensor]:
    """Return of which row each sample is a copy, -1 where of none (n,), and the similarity to the row that is most
    similar to it (n,), of those before it that stay; -1 where there is none.

    Rows come in the order in which they are preferred. Those that stay are less similar than `threshold` to each
    other, and each copy is at least that similar to one of them."""
    x = of.x
    original, best = x.new_full((len(x),), -1, dtype=torch.long), x.new_full((len(x),), -1.0)
    stay = torch.arange(0, device=x.device)
    for rows in torch.arange(len(x), device=x.device).split(PIECE):
        near, similarity = _most_similar(of, rows, stay)
        inside = of.between(rows, rows).tril(-1)
        kept = similarity < threshold
        for row in (inside >= threshold).any(1).nonzero()[:, 0].tolist():  # earlier rows are decided already
            kept[row] &= not bool(((inside[row] >= threshold) & kept).any())
        among = inside.masked_fill(~kept | torch.ones_like(inside, dtype=torch.bool).triu(), -1.0).max(1)
        closer = among.values > similarity
        best[rows] = torch.where(closer, among.values, similarity)
        original[rows] = torch.where(kept, -1, torch.where(closer, rows[among.indices], near))
        stay = torch.cat([stay, rows[kept]])
    return original, best


def _most_similar(of: Likeness, rows: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Return to which of some other rows each row is most similar, and how similar; -1 without any."""
    near, best = torch.full_like(rows, -1), torch.full_like(of.x[rows, 0], -1.0)
    for some in others.split(OTHERS):
        if len(some):
            found = of.between(rows, some).max(1)
            closer = found.values > best
            near, best = torch.where(closer, some[found.indices], near), torch.where(closer, found.values, best)
    return near, best
