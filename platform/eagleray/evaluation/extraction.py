"""Get the frozen features of a backbone: from the cache, or extracted in this process, in Ray tasks or on ranks."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from eagleray.base import devices
from eagleray.base.errors import UserError
from eagleray.base.progress import progress_bar
from eagleray.cluster.ray_map import ray_map
from eagleray.config.types import Format
from eagleray.data.digests import data_digest
from eagleray.data.index import Index, open_index
from eagleray.engine import world
from eagleray.engine.precision import format_name
from eagleray.evaluation import embeddings, feature_cache
from eagleray.evaluation.target import Inputs, Target
from eagleray.models.token_linear import on_device
from eagleray.protocols.features import FORMATS, LabelledFeatures, extract_features, own_samples
from eagleray.protocols.image_batches import Reading
from eagleray.protocols.needs import Extraction


@dataclass(frozen=True)
class Task:
    """The images of which one worker extracts features, and the settings of the extraction."""

    inputs: Inputs
    url: str  # URL of the shards
    samples: NDArray[np.int64]
    how: Extraction
    kinds: Sequence[str] = ()  # types of features to extract
    number: int = 0  # index of the worker's share; shares are in the order of the samples
    data: str = ""  # digest of the shards at the URL, which a worker compares; empty: they are not compared

    def open(self) -> Index:
        """Open the index of the shards with the images. Raises UserError when `data` is the digest of others."""
        index = open_index(self.url, self.inputs.spare or None, note=lambda _: None, channels=self.inputs.channels)
        if self.data and self.data != data_digest(index, self.samples[:0]):
            raise UserError(f"{self.url}: the data changed meanwhile; the same command begins anew")
        return index

    def key(self, here: torch.device) -> tuple[object, ...]:
        """Return the settings that decide on features, without backbone, images and type. For `here` see
        `precision`."""
        bank = self.inputs.bank
        return (self.how.size, self.how.resize, *(() if bank == "fp32" else (bank,)), self.precision(here))

    def shares(self, wanted: Sequence[str], workers: int) -> Iterator["Task"]:
        """Yield a task for each of the `workers`: to extract the types `wanted` for an equal share of the samples."""
        for number, samples in enumerate(np.array_split(self.samples, workers)):
            yield replace(self, samples=samples, kinds=tuple(wanted), number=number)

    def precision(self, here: torch.device) -> str:
        """Return the number format: bfloat16 for Ray tasks with GPUs, else that of the device `here`."""
        return "bfloat16" if self.inputs.gpus and not devices.is_accelerator(here) else format_name(here)


Share = tuple[int, dict[str, LabelledFeatures]]


def features(
    one: Target, index: Index, task: Task, *, workers: int, note: Callable[[str], None]
) -> dict[str, LabelledFeatures]:
    """Return the features of a task's images by type.

    Features in the cache are read. `workers` Ray tasks, each with a GPU if `task.inputs.gpus` is true, extract the
    others; if `workers` is 0, this process does. Raises UserError when the backbone or the data cannot be read, and
    Outage when the storage does not answer."""
    device = world.local().device
    where = devices.CPU if workers else device  # decides the number format, unless workers have GPUs

    def make(missing: Sequence[str]) -> dict[str, LabelledFeatures]:
        known = dict(embedded(index, task, missing, task.precision(where), note))
        if not (missing := [kind for kind in missing if kind not in known]):
            return known
        note(f"{len(task.samples)} images through {one.name}: {', '.join(missing)} features")
        return known | extract(missing)

    def extract(missing: Sequence[str]) -> dict[str, LabelledFeatures]:
        with progress_bar("images") as progress:
            tick = functools.partial(progress.advance, progress.add_task("features", total=len(task.samples), rate=""))
            if workers:
                tasks = replace(task, data=data_digest(index, task.samples[:0])).shares(missing, workers)
                parts = ray_map(share, tasks, workers=workers, gpus=task.inputs.gpus)
                return join_shares(report_progress(parts, tick))
            return extract_features(
                on_device(one.backbone, device),
                index,
                task.samples,
                size=task.how.size,
                resize=task.how.resize,
                kinds=missing,
                bank=task.inputs.bank,
                reading=Reading.beside(device),
                tick=tick,
            )

    data, how = data_digest(index, task.samples), task.key(where)
    return feature_cache.cached(task.inputs.digest, data, task.kinds, how=how, make=make, note=note)


def embedded(
    index: Index, task: Task, kinds: Sequence[str], precision: str, note: Callable[[str], None]
) -> Iterator[tuple[str, LabelledFeatures]]:
    """Yield the task's features of those `kinds` that `eagleray embed` has written next to the shards."""
    for kind in kinds:
        wanted = {"digest": task.inputs.digest, "kind": kind, "size": task.how.size, "resize": task.how.resize}
        if not (found := embeddings.beside(index, wanted | {"precision": precision})):
            continue
        note(f"{len(task.samples)} {kind} features from {found.folder}")
        features, good = embeddings.read_features(found, task.samples)
        labels = torch.from_numpy(index.label[task.samples[good]])
        yield kind, LabelledFeatures(torch.from_numpy(features[good]).to(FORMATS[task.inputs.bank]), labels)


def own_features(index: Index, task: Task, note: Callable[[str], None]) -> dict[str, LabelledFeatures]:
    """Return the features of this rank's share of the task's images, by type. They are read from the cache of this
    machine, or extracted. Called by all ranks together."""

    def make(missing: Sequence[str]) -> dict[str, LabelledFeatures]:
        note(f"{len(task.samples)} images through {task.inputs.backbone}: {', '.join(missing)} features")
        return _extract(replace(task, kinds=missing), index, "auto")

    data, how = data_digest(index, own_samples(task.samples)), task.key(world.device_of(task.inputs.gpus))
    return feature_cache.cached(task.inputs.digest, data, task.kinds, how=how, make=make, note=note)


def share(task: Task) -> Share:
    """In a Ray task, return the index of its share of the images, and the features of the share by type."""
    return task.number, _extract(task, task.open(), "bf16" if task.inputs.gpus else "auto")


def _extract(task: Task, index: Index, precision: Format) -> dict[str, LabelledFeatures]:
    """Extract the features of the task's images on this worker. If there are several ranks, only this rank's share."""
    inputs = task.inputs
    return extract_features(
        inputs.load(),
        index,
        task.samples,
        size=task.how.size,
        resize=task.how.resize,
        kinds=task.kinds,
        precision=precision,
        bank=inputs.bank,
        reading=Reading.beside(world.device_of(inputs.gpus)),
    )


def report_progress(shares: Iterable[Share], tick: Callable[[int], None]) -> Iterator[Share]:
    """Yield the results of the workers. For each, `tick` is called with its number of images."""
    for number, part in shares:
        yield number, part
        tick(len(next(iter(part.values())).y))


def join_shares(shares: Iterable[Share]) -> dict[str, LabelledFeatures]:
    """Concatenate the results of the workers in the order of the samples. The results may come in any order."""
    parts = [part for _, part in sorted(shares, key=lambda share: share[0])]
    nonempty = [p for p in parts if len(next(iter(p.values())).y)] or parts[:1]
    return {k: LabelledFeatures(*map(torch.cat, zip(*(p[k] for p in nonempty), strict=True))) for k in nonempty[0]}
