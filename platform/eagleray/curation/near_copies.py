"""Finds samples whose features are nearly those of another one, within clusters.

As in SemDeDup (arXiv 2303.09540), only samples of one cluster are compared, by the cosine similarity of their features.
Of near copies the largest file stays here, where the paper keeps what is farthest from the centre.
"""

import torch
from torch import Tensor

PIECE = 1024  # rows that are compared with others at once
OTHERS = 2**16  # of those others


def near_copies(x: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Return of which row each vector (n, D) of length 1 is a copy, -1 where of none (n,), and the similarity to the
    row that is most similar to it (n,), of those before it that stay; -1 where there is none.

    Rows come in the order in which they are preferred. Those that stay are less similar than `threshold` to each
    other, and each copy is at least that similar to one of them."""
    original, best = x.new_full((len(x),), -1, dtype=torch.long), x.new_full((len(x),), -1.0)
    stay = torch.arange(0, device=x.device)
    for rows in torch.arange(len(x), device=x.device).split(PIECE):
        near, similarity = _most_similar(x[rows], x, stay)
        inside = (x[rows] @ x[rows].T).tril(-1)
        kept = similarity < threshold
        for row in (inside >= threshold).any(1).nonzero()[:, 0].tolist():  # in order: what is before it is decided
            kept[row] &= not bool(((inside[row] >= threshold) & kept).any())
        among = inside.masked_fill(~kept | torch.ones_like(inside, dtype=torch.bool).triu(), -1.0).max(1)
        closer = among.values > similarity
        best[rows] = torch.where(closer, among.values, similarity)
        original[rows] = torch.where(kept, -1, torch.where(closer, rows[among.indices], near))
        stay = torch.cat([stay, rows[kept]])
    return original, best


def _most_similar(x: Tensor, others: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return to which of some rows of `others` each vector is most similar, and how similar; -1 without any."""
    near, best = torch.full_like(x[:, 0], -1, dtype=torch.long), torch.full_like(x[:, 0], -1.0)
    for some in rows.split(OTHERS):
        if len(some):
            found = (x @ others[some].T).max(1)
            closer = found.values > best
            near, best = torch.where(closer, some[found.indices], near), torch.where(closer, found.values, best)
    return near, best
