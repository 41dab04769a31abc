"""Embed all samples of a data set: features from a backbone into Parquet files, continued where it was killed."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from eagleray.base import devices
from eagleray.base.errors import UserError
from eagleray.base.files import writing
from eagleray.base.progress import progress_bar
from eagleray.cluster.ray_map import ray_map
from eagleray.config.types import Format
from eagleray.data.index import Index, open_index
from eagleray.engine import world
from eagleray.engine.precision import autocast, format_name
from eagleray.evaluation.embeddings import (
    FOLDER,
    Embedding,
    encode,
    part_url,
    parts_there,
    read_about,
    samples_of,
    table_of,
    write_about,
)
from eagleray.evaluation.target import Target, load_in_worker
from eagleray.models.backbone import Backbone
from eagleray.protocols import feature_types
from eagleray.protocols.digests import data_digest
from eagleray.protocols.eval_mode import in_eval_mode
from eagleray.protocols.image_batches import batches
from eagleray.storage.store import parent, store
from eagleray.views.photometric import normalise

Note = Callable[[str], None]


@dataclass(frozen=True)
class Part:
    """A part of an embedding, for the process that computes it."""

    number: int
    embedding: Embedding
    url: str  # of the shards
    out: str
    backbone: str  # its name, see `load_target`
    architecture: str | None  # timm's name, for a file of tensors
    gpus: bool  # each worker has a GPU


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
) -> tuple[str, Embedding]:
    """Write the features of all samples into the folder or URL `out`, and return it with its description. Parts that
    are there already stay as they are.

    Raises UserError when `out` has the embedding of other images or of another backbone, and when the backbone lacks
    this type of features; Outage when a store does not answer."""
    index = open_index(url, note=note)
    where = devices.CPU if workers else world.local().device
    backbone = target.backbone.to(where)
    size, resize = size or target.settings.size, resize or target.settings.resize
    feature_types.check(backbone, kind, size)
    folder = out or default_folder(index, target)
    embedding = Embedding(
        backbone=target.name,
        digest=target.digest,
        kind=kind,
        dim=width(backbone, kind, size),
        size=size,
        resize=resize,
        precision="bfloat16" if gpus else format_name(where),
        data=data_digest(index, np.arange(len(index))),
        images=len(index),
    )
    known = read_about(folder)
    if known and not known.same_as(embedding):
        raise UserError(f"{difference(folder, known, embedding)}; out=FOLDER names another place")
    if not known:
        with writing(f"out={folder}"):
            write_about(folder, embedding)
    done = parts_there(folder, embedding)
    missing = [
        Part(n, embedding, url, folder, target.name, architecture, gpus)
        for n in range(embedding.parts)
        if n not in done
    ]
    if workers:
        finished = ray_map(embed_in_worker, missing, workers=workers, gpus=gpus)
    else:
        finished = (embed_part(index, backbone, part, precision="auto") for part in missing)
    with progress_bar("images") as progress:
        images = sum(len(samples_of(n, len(index))) for n in done)
        task = progress.add_task("embedding", total=len(index), completed=images, rate="")
        for number in finished:
            progress.advance(task, len(samples_of(number, len(index))))
    return folder, embedding


def default_folder(index: Index, target: Target) -> str:
    """Return the place of an embedding beside the shards. Raises UserError where they are in several folders."""
    folders = {parent(blob.url) for blob in index.shards}
    if len(folders) > 1:
        raise UserError(f"out: missing; the shards are in {len(folders)} folders, such as {min(folders)}")
    name = target.name.rstrip("/").rpartition("/")[2].replace(":", "-")
    return f"{folders.pop()}/{FOLDER}/{name}-{target.digest[:8]}"


def difference(folder: str, known: Embedding, wanted: Embedding) -> str:
    """Return a line that says why an embedding cannot be continued."""
    if known.data != wanted.data:
        return f"{folder}: has the embedding of other images ({known.images:,}, here {wanted.images:,})"
    if known.digest != wanted.digest:
        return f"{folder}: has the embedding of another backbone, {known.backbone}"
    names = ("kind", "size", "resize", "precision", "format")
    changed = [f"{n}={getattr(known, n)}" for n in names if getattr(known, n) != getattr(wanted, n)]
    return f"{folder}: has an embedding with {', '.join(changed)}"


@in_eval_mode
@torch.inference_mode()
def width(backbone: Backbone, kind: str, size: int) -> int:
    """Return the width of a type of features."""
    x = torch.zeros(1, 3, size, size, device=next(backbone.parameters()).device)
    return int(feature_types.read(backbone, x, [kind])[kind].shape[1])


def embed_part(index: Index, backbone: Backbone, part: Part, *, precision: Format) -> int:
    """Compute a part and write it, and return its number. Raises UserError when it cannot be written."""
    samples = samples_of(part.number, part.embedding.images)
    features, good = features_of(backbone, index, samples, part.embedding, precision)
    place = part_url(part.out, part.number)
    with writing(f"out={part.out}"):
        store(place).write(place, encode(table_of(index, samples, features, good)))
    return part.number


@in_eval_mode
@torch.inference_mode()
def features_of(
    backbone: Backbone, index: Index, samples: NDArray[np.int64], embedding: Embedding, precision: Format
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Return the features (n, D) of neighbouring samples, and which of their images decode."""
    features, good = np.zeros((len(samples), embedding.dim), np.float32), np.zeros(len(samples), bool)
    device = next(backbone.parameters()).device
    for rows, images in batches(index, samples, embedding.size, embedding.resize, device=device):
        x, at = normalise(images, device), np.asarray(rows) - samples[0]
        with autocast(device, precision):
            values = feature_types.read(backbone, x, [embedding.kind])[embedding.kind]
        features[at], good[at] = values.float().cpu().numpy(), True
    return features, good


def embed_in_worker(part: Part) -> int:
    """Compute a part in a Ray task."""
    backbone = load_in_worker(part.backbone, part.architecture, part.embedding.digest, part.gpus)
    index = _opened(part.url, part.embedding.data)
    return embed_part(index, backbone, part, precision="bf16" if part.gpus else "auto")


@functools.lru_cache(maxsize=1)
def _opened(url: str, digest: str) -> Index:
    """Open an index once for tasks that follow each other. Raises UserError when the data has changed since the command
    began."""
    index = open_index(url, note=lambda _: None)
    if data_digest(index, np.arange(len(index))) != digest:
        raise UserError(f"{url}: the data changed during the embedding")
    return index
