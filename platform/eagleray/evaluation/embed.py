"""Embed a data set: write a backbone's features of all samples to Parquet files. A killed command can be continued."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from eagleray.base import devices
from eagleray.base.numbers_given import whole
from eagleray.base.progress import progress_bar
from eagleray.cluster.ray_map import ray_map
from eagleray.config.types import Format
from eagleray.data.digests import data_digest
from eagleray.data.index import Index, open_shown
from eagleray.data.sample_table import About, SampleTable, home_of, index_of
from eagleray.engine import world
from eagleray.engine.precision import format_name
from eagleray.evaluation.embeddings import COLUMN, FOLDER, WHAT, column_of
from eagleray.evaluation.target import Inputs, Target, check_crop
from eagleray.models.backbone import Backbone
from eagleray.protocols.eval_mode import in_eval_mode
from eagleray.protocols.features import check_kind, embedded, read_kinds
from eagleray.protocols.image_batches import THREADS, Reading

Note = Callable[[str], None]
PARTS = 16  # largest number of parts that one Ray task with a GPU computes


@dataclass(frozen=True)
class Part:
    """The description of a part of an embedding, which is sent to the process that computes the part."""

    number: int  # index of the part in the table
    table: SampleTable
    url: str  # URL of the shards
    inputs: Inputs


def embed(
    target: Target,
    url: str,
    out: str | None,
    *,
    kind: str,
    size: int | None = None,
    resize: int | None = None,
    architecture: str | None = None,
    workers: int = 0,
    gpus: bool = False,
    note: Note = print,
) -> SampleTable:
    """Write the features of all samples into the folder or URL `out`, without computing parts again that exist already.

    Raises UserError when the options contradict each other, when `out` has features of other images or another
    backbone, and when the backbone has no features of type `kind`. Raises Outage when a store does not answer."""
    size = target.settings.size if size is None else whole("size", size, 1)
    resize = target.settings.resize if resize is None else whole("resize", resize, 1)
    check_crop(size, resize)
    index = open_shown(url, note=note, channels=target.channels)
    where = devices.CPU if workers else world.local().device
    backbone = target.backbone.to(where)
    check_kind(backbone, kind, size)
    settings = {
        "digest": target.digest,
        "kind": kind,
        "dim": width(backbone, kind, size),
        "size": size,
        "resize": resize,
        "precision": "bfloat16" if gpus else format_name(where),
    }
    data = data_digest(index, np.arange(len(index)))
    about = About(WHAT, settings, data, len(index), note=f"features of {target.name}")
    table = SampleTable.create(out or default_folder(index, target), about)
    missing = table.missing()
    inputs = Inputs(target.name, target.digest, architecture, gpus=gpus, channels=target.channels)
    tasks = [Part(number, table, url, inputs) for number in missing]
    if workers:
        # A task with a GPU computes several parts, because Ray takes seconds to start a process for each such task.
        each = max(min(len(tasks) // (4 * workers), PARTS), 1) if gpus else 1
        groups = [tasks[first : first + each] for first in range(0, len(tasks), each)]
        finished: Iterable[int] = itertools.chain.from_iterable(
            ray_map(embed_in_worker, groups, workers=workers, gpus=gpus)
        )
    else:
        finished = (embed_part(index, backbone, part, precision="auto") for part in tasks)
    with progress_bar("images") as progress:
        left = sum(len(table.samples(number)) for number in missing)
        task = progress.add_task("embedding", total=len(index), completed=len(index) - left, rate="")
        for number in finished:
            progress.advance(task, len(table.samples(number)))
    return table


def default_folder(index: Index, target: Target) -> str:
    """Return the folder for an embedding: the one next to the shards. Raises UserError if these are in several
    folders."""
    name = target.name.rstrip("/").rpartition("/")[2].replace(":", "-")
    return f"{home_of(index)}/{FOLDER}/{name}-{target.digest[:8]}"


@in_eval_mode
@torch.inference_mode()
def width(backbone: Backbone, kind: str, size: int) -> int:
    """Return the length D of the backbone's feature vectors of type `kind` for square images of `size` pixels."""
    x = torch.zeros(1, backbone.channels, size, size, device=next(backbone.parameters()).device)
    return int(read_kinds(backbone, x, [kind])[kind].shape[1])


def embed_part(index: Index, backbone: Backbone, part: Part, *, precision: Format) -> int:
    """Compute and write a part, and return its index. Raises UserError when it cannot be written."""
    samples, settings = part.table.samples(part.number), part.table.about.settings
    reading = Reading.beside(next(backbone.parameters()).device)
    features, good = features_of(backbone, index, samples, settings, precision, reading)
    part.table.write(part.number, index, {COLUMN: column_of(features, good)})
    return part.number


@in_eval_mode
@torch.inference_mode()
def features_of(
    backbone: Backbone,
    index: Index,
    samples: NDArray[np.int64],
    settings: Mapping[str, Any],
    precision: Format,
    reading: Reading = THREADS,
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Return the features (n, D) of n consecutive samples, and a mask (n,) of the images that decode. `settings` are
    those of the embedding: size, resize, kind and dim."""
    features, good = np.zeros((len(samples), settings["dim"]), np.float32), np.zeros(len(samples), bool)
    size, resize, kind = settings["size"], settings["resize"], settings["kind"]
    for rows, values in embedded(backbone, index, samples, size, resize, [kind], precision, reading):
        at = np.asarray(rows) - samples[0]
        features[at], good[at] = values[kind].numpy(), True
    return features, good


def embed_in_worker(parts: Sequence[Part]) -> list[int]:
    """Compute parts of one embedding in a Ray task, and return their indices. Parts that exist are skipped: after a
    task is killed, Ray runs it again."""
    one = parts[0]
    missing, backbone = set(one.table.missing()), one.inputs.load()
    index = index_of(one.url, one.table.about.data, one.inputs.channels)
    precision: Format = "bf16" if one.inputs.gpus else "auto"
    for part in parts:
        if part.number in missing:
            embed_part(index, backbone, part, precision=precision)
    return [part.number for part in parts]
