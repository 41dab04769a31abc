"""Finds near copies in all clusters of a data set, a batch of clusters at a time. First, the features of each batch
are collected in one file on the local disk."""

import mmap
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from eagleray.base import dist
from eagleray.base.files import writing
from eagleray.curation.near_copies import Likeness, across, near_copies, read_hashes, settle, signs
from eagleray.curation.stages import Stages
from eagleray.data.index import Index
from eagleray.data.sample_table import SampleTable
from eagleray.evaluation.embeddings import read_features

TOGETHER = 2**27  # largest number of bytes of features in a batch of clusters, not counting other clusters' samples
GUESTS = 2**14  # largest number of other clusters' samples that are compared with a cluster at a time
Tick = Callable[[str, int, int], None]  # takes the name of a phase, how much of it is done, and its total


@dataclass(frozen=True)
class Comparison:
    """The data set in which near copies are sought, and the thresholds that define near copies."""

    features: SampleTable
    index: Index
    similar: float  # least cosine similarity of near copies
    bits: int | None  # most bits in which hashes of near copies differ; None: hashes are not compared
    device: torch.device


def find_copies(
    of: Comparison, nearest: NDArray[np.int32], parents: Sequence[NDArray[np.int64]], stages: Stages, tick: Tick
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return two arrays (N,): the sample of which each sample is a copy, -1 for none, and its similarity to the most
    similar sample that is kept, nan for none. Each rank compares a share of the clusters, and only rank 0 returns the
    results; the arrays of other ranks have -1 and nan. `nearest` and `parents` are those of `Clusters`."""
    order = sort_samples(nearest[:, 0], parents, of.index.size)
    starts = np.flatnonzero(np.diff(nearest[order, 0], prepend=-1))
    batches = list(in_batches(starts, len(order), TOGETHER // (2 * of.features.about.settings["dim"])))
    batch_of = np.full(int(nearest.max(initial=0)) + 2, -1, np.int32)  # batch of each cluster; the last entry is for -1
    for number, (first, last) in enumerate(batches):
        batch_of[nearest[order[first:last], 0]] = number
    mine = range(len(batches))[dist.rank() :: dist.size()]
    found = {number: stage for number in mine if (stage := stages.load(f"copies-{number:06d}"))}
    if len(found) < len(mine):
        hashes = None if of.bits is None else read_hashes(of.index)
        with tempfile.TemporaryDirectory(prefix="eagleray-copies-") as scratch:
            left = [number for number in mine if number not in found]
            files = sort_features(of.features, batch_of[nearest], left, Path(scratch), tick)
            for number, file in files.items():
                first, last = batches[number]
                stage = compare(of, nearest, order[first:last], file, hashes)
                found[number] = stages.save(f"copies-{number:06d}", **stage)
                tick("near copies", min(dist.size() * last, len(order)), len(order))
    original, near = np.full(len(nearest), -1, np.int64), np.full(len(nearest), np.nan, np.float32)
    pairs = []
    for stage in (stage for rank in dist.gather_at_zero(found) or () for _, stage in sorted(rank.items())):
        original[stage["rows"]], near[stage["rows"]] = stage["original"], stage["similarity"]
        pairs.append([stage[name] for name in ("one", "two", "like")])
    if pairs:
        place = np.empty(len(nearest), np.int64)
        place[np.lexsort((-of.index.size,))] = np.arange(len(nearest))
        settle(original, near, [np.concatenate(column) for column in zip(*pairs, strict=True)], place)
    return original, near


def sort_samples(
    cluster: NDArray[np.int32], parents: Sequence[NDArray[np.int64]], size: NDArray[Any]
) -> NDArray[np.int64]:
    """Return the samples that have a cluster (n,), sorted by cluster and then by falling file size. Clusters with the
    same parents are adjacent, so that most neighbouring clusters are in the same batch."""
    levels: list[NDArray[Any]] = [cluster]
    for members in parents:
        levels.append(members[levels[-1]])
    order = np.lexsort((-size, *levels))
    return order[cluster[order] >= 0]


def compare(
    of: Comparison,
    nearest: NDArray[np.int32],
    order: NDArray[np.int64],
    file: "Features",
    hashes: NDArray[np.uint64] | None,
) -> dict[str, NDArray[Any]]:
    """Find near copies within each of some clusters, whose samples are `order` (n,). Also find similar pairs
    of a kept sample and a sample in `file` that has the cluster of the kept one among its next nearest."""
    with file.path.open("rb") as content:
        mapped = mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_READ)
    file.path.unlink()  # frees the disk when the mapping, which stays valid, is closed
    x = np.frombuffer(mapped, np.float16).reshape(len(file.rows), -1)

    def likeness(rows: NDArray[np.int64]) -> Likeness:
        bits = None if hashes is None else signs(hashes[file.rows[rows]], of.device)
        return Likeness(torch.from_numpy(x[rows]).to(of.device), bits, 64 if of.bits is None else of.bits)

    at = np.searchsorted(file.rows, order)
    label = nearest[order, 0]
    starts = np.flatnonzero(np.diff(label, prepend=-1))
    visit = nearest[file.rows, 1:]
    guests, column = np.nonzero(np.isin(visit, label[starts]))
    guests = guests[np.argsort(visit[guests, column], kind="stable")]
    visited = np.sort(visit[np.isin(visit, label[starts])])
    original, similarity = np.empty(len(order), np.int64), np.empty(len(order), np.float32)
    pairs = []
    for first, last in zip(starts, [*starts[1:], len(order)], strict=True):
        rows = at[first:last]
        copy, close = (v.cpu().numpy() for v in near_copies(likeness(rows), of.similar))
        original[first:last] = np.where(copy < 0, -1, order[first:last][copy])
        similarity[first:last] = np.where(close > -1, close.clip(max=1), np.nan)
        stay = rows[copy < 0]
        low, high = np.searchsorted(visited, [label[first], label[first] + 1])
        for begin in range(low, high, GUESTS):
            some = np.concatenate([stay, guests[begin : min(begin + GUESTS, high)]])
            one, two, alike = (v.cpu().numpy() for v in across(likeness(some), len(stay), of.similar))
            pairs.append((file.rows[some[one]], file.rows[some[two]], alike))
        mapped.madvise(mmap.MADV_DONTNEED)  # pages that were read count as this process's memory
    pairs.append((order[:0], order[:0], similarity[:0]))
    one, two, alike = (np.concatenate(column) for column in zip(*pairs, strict=True))
    found: dict[str, NDArray[Any]] = {"rows": order, "original": original, "similarity": similarity}
    return found | {"one": one, "two": two, "like": alike.clip(max=1)}


@dataclass(frozen=True)
class Features:
    """A file of features (n, D) in float16, of length 1, and the indices of their samples (n,), in rising order."""

    path: Path
    rows: NDArray[np.int64]


def vectors(table: SampleTable, part: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return the features (n, D), scaled to length 1, of the samples in a part of the table that have features, and the
    indices of these samples (n,)."""
    features, good = read_features(table, table.samples(part))
    good &= np.isfinite(features).all(1)  # a NaN would spread to all centres
    return functional.normalize(torch.from_numpy(features[good]), dim=1).numpy(), table.samples(part)[good]


def sort_features(
    table: SampleTable, batch: NDArray[np.int32], wanted: Sequence[int], folder: Path, tick: Tick
) -> dict[int, Features]:
    """Write the features of each wanted batch of clusters into a file of its own. `batch` (N, m) has the batches of the
    m nearest clusters of each sample: its features go into the files of all these batches. The table is read only once.
    Raises UserError when the disk is full."""
    rows: dict[int, list[NDArray[np.int64]]] = {number: [] for number in wanted}
    for part in table.parts:
        samples = table.samples(part)
        if inside := [number for number in np.unique(batch[samples]).tolist() if number in rows]:
            x, good = vectors(table, part)
            for number in inside:
                here = (batch[good] == number).any(1)
                with writing(f"TMPDIR={folder.parent}"), (folder / f"{number}.f16").open("ab") as file:
                    x[here].astype(np.float16).tofile(file)
                rows[number].append(good[here])
        tick("sorting by cluster", int(samples[-1]) + 1, table.about.images)
    return {number: Features(folder / f"{number}.f16", np.concatenate(some)) for number, some in rows.items()}


def in_batches(starts: NDArray[np.int64], samples: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield the first and last position (excluded) of each batch of adjacent clusters. A batch has at most `most`
    samples or is one larger cluster. `starts` are the first positions of the clusters; the last ends at `samples`."""
    first, ends = 0, [*starts[1:].tolist(), samples]
    for end, after in zip(ends, [*ends[1:], np.inf], strict=True):
        if after - first > most:
            yield first, end
            first = end
