"""Clusters a data set's samples by their features, finds near copies, and writes both as columns for `data.train`."""

import itertools
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from eagleray.base import dist
from eagleray.base.errors import UserError
from eagleray.base.files import writing
from eagleray.base.numbers_given import whole
from eagleray.base.progress import PhaseProgress
from eagleray.cluster.ray_ranks import Note, ray_ranks
from eagleray.curation import balance, kmeans
from eagleray.curation.copies import Comparison, Tick, find_copies, vectors
from eagleray.curation.near_copies import LENGTH, hash_tables
from eagleray.curation.stages import Stages
from eagleray.data import index_file
from eagleray.data.columns import MEASURED
from eagleray.data.digests import shard_digests
from eagleray.data.index import Index, open_shown
from eagleray.data.sample_table import About, SampleTable, home_of, index_of
from eagleray.data.sample_uses import with_keys
from eagleray.engine import world
from eagleray.evaluation.embeddings import open_embedding

EACH = 1000  # mean number of samples per cluster of the lowest level, by default
NEIGHBOURS = 4  # nearest clusters of a sample, its own included, in which its near copies are sought
MANY = 0.5  # share of near copies above which a warning says that features hardly tell images apart


@dataclass(frozen=True)
class Task:
    """The work, sent to all ranks: the features to read, the table to write, and where the samples are."""

    features: SampleTable
    table: SampleTable
    url: str  # the URL of the shards
    gpus: bool


class Clusters(NamedTuple):
    """The clusters of all N samples. In `nearest`, a sample without features has -1."""

    nearest: NDArray[np.int32]  # (N, m) the m nearest clusters of the lowest level, nearest first
    similarity: NDArray[np.float32]  # (N,) cosine similarity to the centre of the nearest cluster
    parents: list[NDArray[np.int64]]  # by upper level: for each cluster of the level below, its cluster

    @property
    def of(self) -> NDArray[np.int64]:
        """The cluster of each sample on the lowest level (N,)."""
        return self.nearest[:, 0].astype(np.int64)


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
    """Cluster all samples by their embedding in the folder `features`, and write the results into the folder or URL
    `out`, by default beside the shards.

    Raises UserError when the embedding is of other data, when the numbers of clusters do not fall from level to level,
    and when `out` has another table; Outage when a store does not answer."""
    index = open_shown(url, note=note)
    embedding = open_embedding(features, index)
    levels = clusters or default_levels(len(index))
    check(levels, len(index))
    choice = {"clusters": levels, "similar": similar, "keep": keep, "seed": seed}
    if bits is not None:
        choice["bits"] = whole("bits", bits, 0, LENGTH)
        hash_tables(index)  # raises now rather than after the work if there are no hashes
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
    Stages(table.folder).clear()
    return table


def default_levels(samples: int) -> list[int]:
    """Return the number of clusters on each level, from the lowest: a thousandth of the samples, then a tenth of the
    level below, as long as that has more than 100."""
    levels = [max(samples // EACH, 1)]
    while levels[-1] > 100:
        levels.append(levels[-1] // 10)
    return levels


def check(levels: Sequence[int], samples: int) -> None:
    """Raises UserError unless the numbers of clusters fall from level to level, from at most `samples` to 1 or more."""
    if min(levels) < 1 or list(levels) != sorted(set(levels), reverse=True) or levels[0] > samples:
        said = ",".join(map(str, levels))
        raise UserError(f"--clusters {said}: expected falling numbers from at most {samples:,}, the samples, to 1")


def work_on_ray(task: Task, note: Note) -> None:
    """Do this rank's share in a process of Ray, and note each quarter of a phase; only rank 0's notes are shown."""
    shown: dict[str, int] = {}

    def tick(phase: str, done: int, total: int) -> None:
        if done * 4 // total > shown.get(phase, 0):
            shown[phase] = done * 4 // total
            note(f"{phase}: {done:,} of {total:,} vectors")

    index = dist.together(lambda: index_of(task.url, task.table.about.data))
    work(task, index, world.device_of(task.gpus), tick, note)


def work(task: Task, index: Index, device: torch.device, tick: Tick, note: Note) -> None:
    """Find clusters and copies with the other ranks; rank 0 writes the table and notes how many copies there are."""
    stages = Stages(task.table.folder)
    found = find_clusters(task, stages, device, tick)
    settings = task.table.about.settings
    comparison = Comparison(task.features, index, settings["similar"], settings.get("bits"), device)
    original, similarity = find_copies(comparison, found.nearest, found.parents, stages, tick)
    if dist.rank() == 0:
        write(task.table, index, found, original, similarity)
        copies = int((original >= 0).sum())
        bare = int((found.of < 0).sum())
        note(f"{copies:,} of {len(index):,} images are near copies" + f"; without features: {bare:,}" * bool(bare))
        if copies > MANY * len(index):
            note(
                f"warning: these are {copies / len(index):.0%}: the features hardly tell images apart; a model that "
                f"was trained for longer does, or --similar above {task.table.about.settings['similar']:g}"
            )


def find_clusters(task: Task, stages: Stages, device: torch.device, tick: Tick) -> Clusters:
    """Cluster all samples. Each rank reads a share of the table's parts."""
    table = task.features
    centres, parents = find_centres(task, stages, device, tick)
    mine, found, done = list(table.parts)[dist.rank() :: dist.size()], [], 0
    for part in mine:
        name = f"nearest-{part:06d}"
        if (stage := stages.load(name)) is None:
            x, good = vectors(table, part)
            label, similarity = kmeans.nearest_few(torch.from_numpy(x).to(device), centres, NEIGHBOURS)
            stage = stages.save(name, rows=good, label=label.int().cpu().numpy(), similarity=similarity.cpu().numpy())
        found.append(stage)
        done += len(table.samples(part))
        tick("assigning", min(done * dist.size(), table.about.images), table.about.images)
    nearest = np.full((table.about.images, min(NEIGHBOURS, len(centres))), -1, np.int32)
    near = np.zeros(table.about.images, np.float32)
    for stage in itertools.chain.from_iterable(dist.gather_objects(found)):
        nearest[stage["rows"]], near[stage["rows"]] = stage["label"], stage["similarity"]
    return Clusters(nearest, near, parents)


def find_centres(
    task: Task, stages: Stages, device: torch.device, tick: Tick
) -> tuple[Tensor, list[NDArray[np.int64]]]:
    """Return the centres (k, D) of the lowest level, which are fitted to a random part of the samples, and for each
    higher level the cluster to which each cluster of the level below belongs."""
    sizes, seed = task.table.about.settings["clusters"], task.table.about.settings["seed"]
    before = dist.from_rank_zero(lambda: stages.load("centres"))
    if before is None or not before["last"]:
        with tempfile.TemporaryDirectory(prefix="eagleray-cluster-") as scratch:
            file = Path(scratch) / "fitted.f16"
            drawn = draw(task, file, tick)
            if before is None:
                first = dist.from_rank_zero(lambda: first_centres(task, drawn))
                before = {"rounds": 0, "centres": first.numpy()}

            def passes(number: int) -> Iterator[Tensor]:
                yield from stored(file, task.features.about.settings["dim"], device)
                tick("k-means", (number + 1) * task.table.about.images, kmeans.ROUNDS * task.table.about.images)

            def keep(rounds: int, centres: Tensor, **last: Any) -> None:
                if dist.rank() == 0:
                    given = {"last": False, "parents": np.zeros(0, np.int64)} | last
                    stages.save("centres", rounds=rounds, centres=centres.cpu().numpy(), **given)

            centres = torch.from_numpy(before["centres"]).to(device)
            centres = kmeans.kmeans(passes, centres, done=int(before["rounds"]), keep=keep)
            above = [level.cpu().numpy() for level in kmeans.upper_levels(centres, sizes[1:], seed)]
            before = {"centres": centres.cpu().numpy(), "parents": np.concatenate([*above, np.zeros(0, np.int64)])}
            keep(kmeans.ROUNDS, centres, last=True, parents=before["parents"])
    ends = np.cumsum(sizes[:-1])
    return torch.from_numpy(before["centres"]).to(device), np.split(before["parents"], ends)[:-1]


def draw(task: Task, file: Path, tick: Tick) -> NDArray[np.float32]:
    """Draw two random subsets of the vectors. The centres are fitted to one, of which each rank writes its share into
    its `file` as float16. The first centres are chosen from the other (n, D), which rank 0 returns, without duplicates
    and in an order that depends only on the vectors' values. Raises UserError when the disk is full."""
    table, settings = task.features, task.table.about.settings
    fitted, drawn = kmeans.shares(table.about.images, settings["clusters"][0])
    some: list[tuple[NDArray[np.float64], NDArray[np.float32]]] = []
    file.touch()
    for part in list(table.parts)[dist.rank() :: dist.size()]:
        x, _ = vectors(table, part)
        number = kmeans.numbers_of(x, settings["seed"])
        with writing(f"TMPDIR={file.parent.parent}"), file.open("ab") as out:
            x[number < fitted].astype(np.float16).tofile(out)
        different, first = np.unique(number, return_index=True)
        first = first[different < drawn]
        some.append((number[first], x[first]))
        tick("reading", int(table.samples(part)[-1]) + 1, table.about.images)
    every = [pair for pairs in dist.gather_at_zero(some) or () for pair in pairs]
    if not every:
        return np.zeros((0, table.about.settings["dim"]), np.float32)
    numbers, x = (np.concatenate(column) for column in zip(*every, strict=True))
    return x[np.unique(numbers, return_index=True)[1]]


def first_centres(task: Task, drawn: NDArray[np.float32]) -> Tensor:
    """Choose the first k centres (k, D), far apart, among the vectors `drawn` (n, D). Raises UserError if n < k."""
    clusters = task.table.about.settings["clusters"][0]
    if len(drawn) < clusters:
        raise UserError(
            f"{task.features.folder}: {len(drawn):,} different features were drawn from {task.table.about.images:,} "
            f"samples; expected at least {clusters:,}, the clusters"
        )
    return kmeans.spread(torch.from_numpy(drawn), clusters, task.table.about.settings["seed"])


def stored(file: Path, dim: int, device: torch.device) -> Iterator[Tensor]:
    """Yield the vectors in a float16 file as float32, in pieces (n, D)."""
    with file.open("rb") as f:
        while len(values := np.fromfile(f, np.float16, kmeans.PIECE * dim)):
            yield torch.from_numpy(values).to(device).float().reshape(-1, dim)


def write(
    table: SampleTable, index: Index, found: Clusters, original: NDArray[np.int64], similarity: NDArray[np.float32]
) -> None:
    """Write all parts of the table: the clusters, sampling weight and near copies of each sample."""
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
        without = found.of[rows] < 0  # samples without features have null in `columns`
        written = {name: pa.array(values[rows], mask=without) for name, values in columns.items()}
        written["balance"] = pa.array(weight[rows])  # 0 without features: a weight must not be null
        written["similarity"] = pa.array(similarity[rows], mask=np.isnan(similarity[rows]))
        written["duplicate_of"] = pa.array([names.get(row) for row in original[rows].tolist()], pa.string())
        table.write(part, index, written)


def names_of(index: Index, samples: NDArray[np.int64]) -> dict[int, str]:
    """Return the names of samples, such as `train-000003.tar/000123`."""
    named = with_keys(index, samples.tolist())
    return {sample: f"{index_file.name(index.shards[shard])}/{key}" for sample, shard, key in named}
