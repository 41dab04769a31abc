"""Cluster the samples of a data set by their features, and name near copies: columns for `data.train` to choose by."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from eagleray.base import dist
from eagleray.base.errors import UserError
from eagleray.base.files import writing
from eagleray.base.numbers_given import whole
from eagleray.base.progress import PhaseProgress
from eagleray.cluster.ray_ranks import Note, ray_ranks
from eagleray.curation import balance, kmeans
from eagleray.curation.near_copies import LENGTH, Likeness, hash_tables, near_copies, read_hashes, signs
from eagleray.data.columns import MEASURED
from eagleray.data.digests import shard_digests
from eagleray.data.index import Index, open_shown
from eagleray.data.sample_table import About, SampleTable, home_of, index_of
from eagleray.engine import world
from eagleray.evaluation.embeddings import open_embedding, read_features

EACH = 1000  # samples of a cluster of the lowest level, in the mean
CANDIDATES = 4096  # samples among which the first centres are drawn, at least
TOGETHER = 2**29  # bytes of features that are compared for copies at once
MANY = 0.5  # share of near copies above which something is wrong
Tick = Callable[[str, int, int], None]  # a phase, and how many vectors it has handled of how many


@dataclass(frozen=True)
class Task:
    """Describes the work to all ranks."""

    features: SampleTable
    table: SampleTable
    url: str  # the URL of the shards
    gpus: bool


class Clusters(NamedTuple):
    """The clusters of all samples (N,): -1 for one without features."""

    of: NDArray[np.int64]  # the cluster of each sample on the lowest level
    similarity: NDArray[np.float32]  # cosine with the centre of the cluster
    parents: list[NDArray[np.int64]]  # see `kmeans.hierarchy`


def cluster(
    features: str,
    url: str,
    out: str | None,
    *,
    clusters: Sequence[int] = (),
    similar: float = 0.95,
    bits: int | None = None,
    keep: float = 0.5,
    seed: int = 0,
    workers: int = 0,
    gpus: bool = False,
    note: Note = print,
) -> SampleTable:
    """Write the clusters of all samples into the folder or URL `out`, by default beside the shards, from the embedding
    in the folder `features`.

    Raises UserError when that is none of this data, when numbers contradict each other, and when `out` has another
    table; Outage when a store does not answer."""
    index = open_shown(url, note=note)
    embedding = open_embedding(features, index)
    levels = clusters or default_levels(len(index))
    check(levels, len(index))
    choice = {"clusters": levels, "similar": similar, "keep": keep, "seed": seed}
    if bits is not None:
        choice["bits"] = whole("bits", bits, 0, LENGTH)
        hash_tables(index)  # a wrong table is found before the work begins
    settings = choice | dict(embedding.about.settings)
    about = About(MEASURED, settings, embedding.about.data, len(index), shards=shard_digests(index))
    table = SampleTable.create(out or f"{home_of(index)}/{MEASURED}/clusters", about)
    if table.missing():
        task = Task(embedding, table, url, gpus)
        if workers:
            ray_ranks(work_on_ray, task, workers=workers, gpus=gpus, note=note)
        else:
            with PhaseProgress("vectors") as tick:
                work(task, index, world.local().device, tick, note)
    return table


def default_levels(samples: int) -> list[int]:
    """Return the clusters of each level: a thousandth of the samples, and a tenth of the level below while that is more
    than ten."""
    levels = [max(samples // EACH, 1)]
    while levels[-1] > 100:
        levels.append(levels[-1] // 10)
    return levels


def check(levels: Sequence[int], samples: int) -> None:
    """Raises UserError for numbers of clusters that contradict each other."""
    if min(levels) < 1 or list(levels) != sorted(set(levels), reverse=True) or levels[0] > samples:
        said = ",".join(map(str, levels))
        raise UserError(f"--clusters {said}: expected falling numbers from at most {samples:,}, the samples, to 1")


def work_on_ray(task: Task, note: Note) -> None:
    """Do this rank's share in a process of Ray; rank 0 notes how far it is."""
    shown: dict[str, int] = {}

    def tick(phase: str, done: int, total: int) -> None:
        if done * 4 // total > shown.get(phase, 0):
            shown[phase] = done * 4 // total
            note(f"{phase}: {done:,} of {total:,} vectors")

    index = dist.together(lambda: index_of(task.url, task.table.about.data))
    work(task, index, world.device_of(task.gpus), tick, note)


def work(task: Task, index: Index, device: torch.device, tick: Tick, note: Note) -> None:
    """Find clusters and copies with the other ranks; rank 0 writes the table and notes how many copies there are."""
    found = find_clusters(task, device, tick)
    original, similarity = find_copies(task, index, found.of, device, tick)
    if dist.rank() == 0:
        write(task.table, index, found, original, similarity)
        copies = int((original >= 0).sum())
        note(f"{copies:,} of {len(index):,} images are near copies")
        if copies > MANY * len(index):
            note(
                f"warning: these are {copies / len(index):.0%}: the features hardly tell images apart; a model that "
                f"was trained for longer does, or --similar above {task.table.about.settings['similar']:g}"
            )


def vectors(table: SampleTable, samples: NDArray[np.int64], device: torch.device) -> tuple[Tensor, NDArray[np.bool_]]:
    """Return the features (n, D) of those samples that have some, of length 1, and which these are (N,)."""
    features, good = read_features(table, samples)
    return unit(features[good], features.shape[1], device), good


def unit(features: NDArray[np.float32], dim: int, device: torch.device) -> Tensor:
    """Return features (n, D) at length 1."""
    return functional.normalize(torch.from_numpy(features).reshape(-1, dim).to(device), dim=1)


def find_clusters(task: Task, device: torch.device, tick: Tick) -> Clusters:
    """Cluster all samples. Each rank reads a share of the parts in every pass."""
    settings, table = task.table.about.settings, task.features
    mine = list(table.parts)[dist.rank() :: dist.size()]
    share = sum(len(table.samples(part)) for part in mine)

    def passes(number: int) -> Iterator[Tensor]:
        done = 0
        for part in mine:
            yield vectors(table, table.samples(part), device)[0]
            done += len(table.samples(part))
            tick("k-means", number * share + done, kmeans.ROUNDS * share)

    first = dist.from_rank_zero(lambda: first_centres(table, settings["clusters"][0], settings["seed"]))
    centres, parents = kmeans.hierarchy(passes, first.to(device), settings["clusters"], settings["seed"])
    found = []
    for part in mine:
        x, good = vectors(table, table.samples(part), device)
        label, similarity = (v.cpu().numpy() for v in kmeans.nearest(x, centres))
        found.append((table.samples(part)[good], label, similarity))
    of, near = np.full(table.about.images, -1, np.int64), np.zeros(table.about.images, np.float32)
    for parts in dist.gather_objects(found):
        for rows, label, similarity in parts:
            of[rows], near[rows] = label, similarity
    return Clusters(of, near, [p.cpu().numpy() for p in parents])


def first_centres(table: SampleTable, clusters: int, seed: int) -> Tensor:
    """Return the features (k, D) of samples that lie far apart among some. Raises UserError when too few have any."""
    drawn = np.random.default_rng(seed).permutation(table.about.images)[: max(4 * clusters, CANDIDATES)]
    x, _ = vectors(table, drawn, torch.device("cpu"))
    if len(x) < clusters:
        raise UserError(f"{table.folder}: {len(x):,} of {len(drawn):,} samples have features; expected {clusters:,}")
    return kmeans.spread(x, clusters, seed)


def find_copies(
    task: Task, index: Index, of: NDArray[np.int64], device: torch.device, tick: Tick
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return on rank 0 of which sample each one is a copy (N,), -1 where of none, and the similarity to the nearest one
    that stays (N,), nan where there is none; on other ranks nothing of use. Each rank compares a share of the
    clusters."""
    order = np.lexsort((-index.size, of))
    order = order[of[order] >= 0]  # sorted by cluster, the largest files first
    starts = np.flatnonzero(np.diff(of[order], prepend=-1))
    found, done = [], 0
    dim, settings = task.features.about.settings["dim"], task.table.about.settings
    hashes = read_hashes(index) if "bits" in settings else None
    mine = list(in_batches(starts, len(order), TOGETHER // (4 * dim)))[dist.rank() :: dist.size()]
    with tempfile.TemporaryDirectory(prefix="eagleray-cluster-") as scratch:
        files = sort_features(task.features, [order[first:last] for first, last in mine], Path(scratch), tick)
        for (first, last), file in zip(mine, files, strict=True):
            rows = order[first:last]
            x = torch.empty(len(rows), dim, device=device)
            x[torch.from_numpy(np.argsort(rows)).to(device)] = unit(np.fromfile(file, np.float32), dim, device)
            file.unlink()
            inside = starts[(starts > first) & (starts < last)] - first
            for some, part in zip(np.split(rows, inside), x.tensor_split(inside.tolist()), strict=True):
                like = Likeness(part)
                if hashes is not None:
                    like = Likeness(part, signs(hashes[some], device), settings["bits"])
                copy, similarity = (v.cpu().numpy() for v in near_copies(like, settings["similar"]))
                found.append((some, np.where(copy < 0, -1, some[copy]), similarity))
            done += last - first
            tick("near copies", min(dist.size() * done, len(order)), len(order))
    original, near = np.full(len(of), -1, np.int64), np.full(len(of), np.nan, np.float32)
    for parts in dist.gather_at_zero(found) or ():
        for some, copy, similarity in parts:
            original[some], near[some] = copy, np.where(similarity > -1, similarity, np.nan)
    return original, near


def sort_features(table: SampleTable, batches: Sequence[NDArray[np.int64]], folder: Path, tick: Tick) -> list[Path]:
    """Write the features of each batch of samples into a file of its own, in the order of the table, and return the
    files. The table is read once, whatever the number of batches. Raises UserError when the disk is full."""
    batch = np.full(table.about.images, -1, np.int32)
    for number, rows in enumerate(batches):
        batch[rows] = number
    files = [folder / f"{number}.f32" for number in range(len(batches))]
    for part in table.parts:
        samples = table.samples(part)
        if here := np.unique(batch[samples][batch[samples] >= 0]).tolist():
            features, _ = read_features(table, samples)
            for number in here:
                with writing(f"TMPDIR={folder.parent}"), files[number].open("ab") as file:
                    features[batch[samples] == number].tofile(file)
        tick("sorting by cluster", int(samples[-1]) + 1, table.about.images)
    return files


def in_batches(starts: NDArray[np.int64], samples: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield the first and the last position (excluded) of neighbouring clusters that have at most so many samples
    together, or of one that has more. `starts` are the first positions of all clusters."""
    first, ends = 0, [*starts[1:].tolist(), samples]
    for end, after in zip(ends, [*ends[1:], np.inf], strict=True):
        if after - first > most:
            yield first, end
            first = end


def write(
    table: SampleTable, index: Index, found: Clusters, original: NDArray[np.int64], similarity: NDArray[np.float32]
) -> None:
    """Write all parts of the table."""
    columns: dict[str, Any] = {"cluster": found.of}
    for level, members in enumerate(found.parents, 2):
        columns[f"cluster_{level}"] = members[[*columns.values()][-1]]
    staying = (found.of >= 0) & (original < 0)
    lowest = len(found.parents[0]) if found.parents else int(found.of.max()) + 1
    sizes = np.bincount(found.of[staying], minlength=lowest).astype(np.float64)
    got = balance.shares(sizes, found.parents, table.about.settings["keep"] * staying.sum())
    columns["cluster_size"] = sizes[found.of].astype(np.int32)
    columns["centre_similarity"] = found.similarity
    weight = np.where(staying, (got / np.maximum(sizes, 1))[found.of], 0).astype(np.float32)
    names = names_of(index, np.unique(original[original >= 0]))
    for part in table.parts:
        rows = table.samples(part)
        without = found.of[rows] < 0  # features, and so anything else
        written = {name: pa.array(values[rows], mask=without) for name, values in columns.items()}
        written["balance"] = pa.array(weight[rows])  # 0 without features: a weight must not be null
        written["similarity"] = pa.array(similarity[rows], mask=np.isnan(similarity[rows]))
        written["duplicate_of"] = pa.array([names.get(row) for row in original[rows].tolist()], pa.string())
        table.write(part, index, written)


def names_of(index: Index, samples: NDArray[np.int64]) -> dict[int, str]:
    """Return the names of samples in rising order, such as `train-000003.tar/000123`, reading each shard once."""
    names: dict[int, str] = {}
    shards = np.searchsorted(index.first, samples, side="right") - 1
    for shard in np.unique(shards).tolist():
        mine = samples[shards == shard]
        keys = index.column(shard, ["key"])["key"].take(pa.array(mine - int(index.first[shard]))).to_pylist()
        url = index.shards[shard].url.rpartition("/")[2]
        names |= {row: f"{url}/{key}" for row, key in zip(mine.tolist(), keys, strict=True)}
    return names
