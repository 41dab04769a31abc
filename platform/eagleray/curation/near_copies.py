"""Finds samples whose features are nearly those of another sample, within clusters and across their borders.

As in SemDeDup (arXiv:2303.09540), samples of one cluster are compared by the cosine similarity of their features. Here
samples are also compared with those of the next nearest clusters, as a border may lie between an image and its copy. Of
near copies, the largest file is kept; the paper keeps the sample farthest from the centre. Perceptual hashes tell near
copies from different images of similar content."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eagleray.base.errors import UserError
from eagleray.data.columns import MEASURED, Measured, own_columns
from eagleray.data.index import Index
from eagleray.data.sample_table import SampleTable, complete_tables

PIECE = 1024  # largest number of rows of the matrices of similarities that are computed
COLUMN = "phash"
LENGTH = 63  # bits of a perceptual hash; its text has 64, of which the first is 0
# Mirroring an image negates its odd horizontal frequencies, which are every second bit.
MIRRORED = np.uint64(0x5555_5555_5555_5555)
OTHERS = 2**16  # largest number of columns of the matrices of similarities that are computed


@dataclass(frozen=True)
class Likeness:
    """Compares samples by the cosine similarity of their features `x` (n, D), which are unit vectors. With perceptual
    hashes, as `signs` (n, 64) of -1 and 1, two samples are similar only if their hashes differ in at most `bits` bits,
    as they are or after one image is mirrored."""

    x: Tensor
    signs: Tensor | None = None
    bits: int = 64

    def between(self, rows: Tensor, others: Tensor) -> Tensor:
        """Return the cosine similarities (r, o) of `rows` (r,) and `others` (o,), -1 where hashes differ too much."""
        out = self._directions(rows) @ self._directions(others).T
        if self.signs is not None:
            mirror = signs(MIRRORED.reshape(1), self.x.device)
            some, all_ = self.signs[rows], self.signs[others].T
            alike = torch.maximum(some @ all_, (some * -mirror) @ all_)
            out = out.masked_fill(alike < self.signs.shape[1] - 2 * self.bits, -1.0)
        return out

    def _directions(self, rows: Tensor) -> Tensor:
        """Return the features of `rows` in float32, scaled to length 1 again: rounding to float16 has changed their
        lengths, and the similarity of equal images would fall below 0.9999."""
        x = self.x[rows].float()
        return x.div_(torch.linalg.vector_norm(x, dim=1, keepdim=True).clamp_min_(1e-6))


def near_copies(of: Likeness, threshold: float) -> tuple[Tensor, Tensor]:
    """Return for each sample the row of which it is a copy (n,), and its similarity to the most similar of the earlier
    rows that are kept (n,). Both are -1 for none.

    Rows are in order of preference. The rows that are kept are less similar than `threshold` to each other, and each
    copy is at least that similar to one of them."""
    count, device = len(of.x), of.x.device
    original, best = torch.full((count,), -1, device=device), torch.full((count,), -1.0, device=device)
    stay = torch.arange(0, device=device)
    for rows in torch.arange(count, device=device).split(PIECE):
        near, similarity = _most_similar(of, rows, stay)
        inside = of.between(rows, rows).tril(-1)
        kept = similarity < threshold
        for row in (inside >= threshold).any(1).nonzero()[:, 0].tolist():  # a row depends on earlier ones
            kept[row] &= not bool(((inside[row] >= threshold) & kept).any())
        among = inside.masked_fill(~kept | torch.ones_like(inside, dtype=torch.bool).triu(), -1.0).max(1)
        closer = among.values > similarity
        best[rows] = torch.where(closer, among.values, similarity)
        original[rows] = torch.where(kept, -1, torch.where(closer, rows[among.indices], near))
        stay = torch.cat([stay, rows[kept]])
    return original, best


def _most_similar(of: Likeness, rows: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each of `rows` the most similar of `others`, and the similarity; both are -1 if `others` is empty."""
    near, best = torch.full_like(rows, -1), torch.full_like(rows, -1.0, dtype=torch.float32)
    for some in others.split(OTHERS):
        if len(some):
            found = of.between(rows, some).max(1)
            closer = found.values > best
            near, best = torch.where(closer, some[found.indices], near), torch.where(closer, found.values, best)
    return near, best


def across(of: Likeness, members: int, threshold: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the pairs of a cluster member and another cluster's sample that are at least `threshold` similar: the rows
    (p,) of the members, those of the other samples, and the similarities (p,). Members are the first rows of `of`."""
    rows = torch.arange(len(of.x), device=of.x.device)
    found = []
    for some, others in itertools.product(rows[members:].split(PIECE), rows[:members].split(OTHERS)):
        similarity = of.between(some, others)
        at, to = (similarity >= threshold).nonzero(as_tuple=True)
        found.append((others[to], some[at], similarity[at, to]))
    one, two, alike = (torch.cat(part) for part in zip(*found, strict=True))
    return one, two, alike


def settle(
    original: NDArray[np.int64],
    similarity: NDArray[np.float32],
    pairs: Sequence[NDArray[Any]],
    place: NDArray[np.int64],
) -> None:
    """Decide which samples of similar pairs from different clusters are kept, and update `original` and `similarity`
    (N,), which were found within clusters. `pairs` are arrays (p,) of two samples and of their similarity; `place` (N,)
    ranks samples by preference, lowest first.

    As within a cluster, a sample is a copy if it is similar to a preferred one that is kept. Copies of a sample that
    becomes a copy become copies of the sample that is kept."""
    one, two, like = (part[(original[pairs[0]] < 0) & (original[pairs[1]] < 0)] for part in pairs)
    ahead = place[one] < place[two]
    first, second = np.where(ahead, one, two), np.where(ahead, two, one)
    order = np.argsort(like, kind="stable")  # rising, so that the most similar one is written last and stays
    first, second, like = first[order], second[order], like[order]
    while len(first):
        sure = ~np.isin(first, second)  # pairs whose first sample is kept: none is preferred to it
        original[second[sure]], similarity[second[sure]] = first[sure], like[sure]
        left = (original[first] < 0) & (original[second] < 0)
        first, second, like = first[left], second[left], like[left]
    again = np.flatnonzero(original >= 0)
    again = again[original[original[again]] >= 0]
    original[again] = original[original[again]]


def hash_tables(index: Index) -> list[SampleTable]:
    """Return the tables beside the shards with the hashes that `eagleray data measure` writes. Raises UserError when
    there are none."""
    tables = complete_tables(index.shards, MEASURED, lambda about: COLUMN in about.settings.get("measures", ()))
    if not (found := list(tables)):
        raise UserError(f"--bits: needs the column {COLUMN}, which eagleray data measure writes beside the shards")
    return found


def read_hashes(index: Index) -> NDArray[np.uint64]:
    """Return the hashes of all samples (N,), 0 for images that do not decode. Raises what `hash_tables` raises."""
    measured, out = [Measured(table) for table in hash_tables(index)], np.zeros(len(index), np.uint64)
    for shard in range(len(index.shards)):
        texts = own_columns(index, shard, [COLUMN], measured)[COLUMN].to_pylist()
        out[index.first[shard] : index.first[shard + 1]] = [int(text or "0", 16) for text in texts]
    return out


def signs(hashes: NDArray[np.uint64], device: torch.device) -> Tensor:
    """Return the bits of hashes (n,) as -1 and 1 (n, 64): the dot product of two rows is 64 less twice the number of
    differing bits."""
    bits = np.unpackbits(hashes.astype("<u8").view(np.uint8).reshape(-1, 8), axis=1)
    return torch.from_numpy(bits).to(device).float().mul_(2).sub_(1)
