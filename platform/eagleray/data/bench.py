"""Measures how fast each stage of the input runs on this machine, and which stage limits the others."""

import itertools
import math
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagleray.base.devices import one_thread
from eagleray.base.errors import UserError, explained
from eagleray.config.view import View
from eagleray.data.blocks import THREADS
from eagleray.data.decode import BadImage, decode
from eagleray.data.index import Index, Note, list_data, open_index
from eagleray.data.loader import Loader
from eagleray.data.reader import StepPart, Stream
from eagleray.storage.ordered_map import ordered_map
from eagleray.storage.store import folder_of
from eagleray.views import sampling
from eagleray.views.crop import crop
from eagleray.views.sampling import Views

VIEWS = Views.of([View(size=224, count=2)])
IMAGES = 256  # images that are decoded and cropped over and over
LANES, ROWS = 8, 4  # lanes (equal slices of a batch) of the stream; images of each lane per step
PROCESSES = 4  # largest number of loader processes
PATIENT = 4  # largest factor by which the time to measure a stage grows if its store is slow
HALF = 0.5  # fraction of the rate that the other stages allow; a stage below it is itself the bottleneck
LARGE = 640  # mean longer side in pixels above which the advice is to make the images smaller, too


@dataclass(frozen=True)
class Stage:
    """The measurement of one stage of the input: the images and bytes that it handled, and the seconds it took."""

    name: str
    seconds: float
    images: int
    bytes: int  # read from image files
    processes: int = 0  # number of processes that share the CPU work; 0 for a stage that only reads

    @property
    def rate(self) -> float:
        """Images per second."""
        return self.images / self.seconds

    def row(self) -> dict[str, float]:
        """Return the rates of the stage under the names that the report uses."""
        core = {"images_per_s_per_core": self.rate / self.processes} if self.processes else {}
        return {"images_per_s": self.rate, "mb_per_s": self.bytes / self.seconds / 1e6} | core


@dataclass(frozen=True)
class Report:
    """The measured stages in the order in which images pass them, and advice on the slowest."""

    url: str
    images: int
    list_s: float
    index_s: float
    cores: int
    stages: list[Stage]
    bottleneck: str  # name of a stage
    advice: str  # one sentence

    def json(self) -> dict[str, Any]:
        """Return the report as rounded values that JSON can hold."""
        stages = {s.name: {k: float(f"{v:.4g}") for k, v in s.row().items()} for s in self.stages}
        times = {"list_s": round(self.list_s, 4), "index_s": round(self.index_s, 4)}
        facts = {"url": self.url, "images": self.images, "cores": self.cores}
        return facts | times | {"stages": stages, "bottleneck": self.bottleneck, "advice": self.advice}

    def lines(self) -> Iterator[str]:
        """Yield the report as lines of text."""
        yield f"{self.images} images, {self.cores} cores; listing {self.list_s:.2f} s, index {self.index_s:.2f} s"
        yield f"{'stage':<8}{'images/s':>10}{'MB/s':>10}{'per core':>10}"
        for stage in self.stages:
            core = f"{stage.rate / stage.processes:.0f}" if stage.processes else "-"
            yield f"{stage.name:<8}{stage.rate:>10.0f}{stage.row()['mb_per_s']:>10.1f}{core:>10}"
        yield f"bottleneck: {self.advice}"


def bench(url: str, *, seconds: float, note: Note) -> Report:
    """Measure each stage for `seconds`. Raises UserError when the shards, or all of their images, are unreadable."""
    begin = time.perf_counter()
    list_data(url)
    listed = time.perf_counter()
    with TemporaryDirectory() as spare:
        index = open_index(url, Path(spare), note=note)
        opened = time.perf_counter()
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        stages, side = measure(index, seconds, cores)
    remote = folder_of(url) is None
    bottleneck, advice = find_bottleneck({s.name: s for s in stages}, cores=cores, side=side, remote=remote)
    return Report(url, len(index), listed - begin, opened - listed, cores, stages, bottleneck, advice)


def measure(index: Index, seconds: float, cores: int) -> tuple[list[Stage], float]:
    """Return the measured stages, and the mean longer side of the images in pixels."""
    stream = small_stream(index)
    files: list[bytes] = []
    with one_thread():
        raw = time_stage("store", math.inf, block_work(index, seconds))
        block = raw.bytes / raw.images * len(index) / len(index.block_sizes)
        lead = round(2 * stream.lanes * block)  # bytes of the two blocks that each lane requests at the start
        read = time_stage("read", seconds, read_work(stream, files), least=lead)
        images = decode_all(files, index.shards[0].url)
        core = [
            time_stage(n, seconds, f(images), processes=1) for n, f in (("decode", decode_work), ("crop", crop_work))
        ]
        processes = min(cores, PROCESSES, stream.lanes)
        steps = loader_work(stream, processes, read.bytes / read.images)
        stages = [raw, read, *core, time_stage("loader", seconds, steps, least=lead, processes=processes)]
    return stages, float(np.mean([max(image.shape) for _, image in images]))


def small_stream(index: Index) -> Stream:
    """Return a stream with a batch that is small enough for any data set."""
    lanes = min(LANES, len(index))
    return Stream(index, VIEWS, seed=0, lanes=lanes, batch=lanes * min(ROWS, len(index) // lanes))


Work = tuple[int, int]  # number of images, and number of bytes


def time_stage(name: str, seconds: float, work: Iterable[Work], *, least: int = 0, processes: int = 0) -> Stage:
    """Time a stage for `seconds`, or longer until its `work` has handled `least` bytes, but for PATIENT times `seconds`
    at most."""
    images = size = 0
    begin = end = time.perf_counter()
    for n, length in work:
        images, size, end = images + n, size + length, time.perf_counter()
        if end > begin + seconds * (1 if size >= least else PATIENT):
            break
    return Stage(name, end - begin, images, size, processes)


def block_work(index: Index, seconds: float) -> Iterator[Work]:
    """Read whole blocks in random order, with as many concurrent requests as a reader makes.

    After `seconds` no further block is requested. Pending requests, of which a slow store has many, still count."""
    end = time.perf_counter() + seconds

    def one(block: int) -> Work:
        first, last = int(index.starts[block]), int(index.starts[block + 1])
        return last - first, len(index.read(first, last))

    order = itertools.cycle(np.random.default_rng(0).permutation(len(index.block_sizes)).tolist())
    return ordered_map(one, itertools.takewhile(lambda _: time.perf_counter() < end, order), width=THREADS)


def read_work(stream: Stream, files: list[bytes]) -> Iterator[Work]:
    """Read the bytes of every image as a reader does, and append those of the first IMAGES images to `files`."""
    with explained(f"{stream.index.shards[0].url}: an image cannot be used", BadImage):
        for _, data in stream.samples(range(stream.lanes), start=0):
            if len(files) < IMAGES:
                files.append(bytes(data))
            yield 1, len(data)


def decode_all(files: list[bytes], url: str) -> list[tuple[bytes, Tensor]]:
    """Return the files that can be decoded, each with its image. Raises UserError when no file can be decoded."""
    images = []
    for data in files:
        try:
            images.append((data, decode(data)))
        except BadImage as e:
            problem = e
    if not images:
        raise UserError(f"{url}: none of {len(files)} images can be decoded: {problem}")
    return images


def decode_work(images: list[tuple[bytes, Tensor]]) -> Iterator[Work]:
    """Decode the images again and again, and yield the bytes of each."""
    for data, _ in itertools.cycle(images):
        decode(data)
        yield 1, len(data)


def crop_work(images: list[tuple[bytes, Tensor]]) -> Iterator[Work]:
    """Cut two random crops from each image, again and again, and yield the bytes of each image."""
    views = VIEWS.views
    out = [torch.empty(3, view.size, view.size, dtype=torch.uint8) for view in views]
    for number, (data, image) in enumerate(itertools.cycle(images)):
        u = sampling.uniforms(len(views), seed=0, epoch=0, sample=number)
        crop(image, sampling.crops(VIEWS, u, *image.shape[1:]), views, out)
        yield 1, len(data)


class _HostOnly(Loader):
    """A loader that copies nothing to the device and does no work on it."""

    def assemble(self, parts: tuple[StepPart, ...]) -> tuple[StepPart, ...]:  # type: ignore[override]
        for part in parts:
            if part.error:
                raise part.error
        return parts


def loader_work(stream: Stream, processes: int, mean: float) -> Iterator[Work]:
    """Yield the number of images and of bytes of each step of loader processes. Images have `mean` bytes on average.

    The first step is not counted, because it includes the start of the processes."""
    steps: Iterator[Any] = _HostOnly(stream, rank=0, ranks=1, workers=processes, device=torch.device("cpu")).batches(0)
    next(steps)
    images = stream.batch, round(stream.batch * mean)
    return (images for _ in steps)


def find_bottleneck(stages: dict[str, Stage], *, cores: int, side: float, remote: bool) -> tuple[str, str]:
    """Return the name of the stage that limits the loader, and a sentence on what to do about it."""
    rate, processes = {name: stage.rate for name, stage in stages.items()}, stages["loader"].processes
    core = 1 / (1 / rate["decode"] + 1 / rate["crop"])
    works, comes = processes * core, min(rate["store"], rate["read"])
    smaller = f", or smaller images: their longer side is {side:.0f} pixels (`eagleray prepare --max-side`)"
    smaller = smaller if side > LARGE else ""
    if rate["loader"] < HALF * min(works, comes):
        return "loader", (
            f"loader: {rate['loader']:.0f} images/s arrive where {min(works, comes):.0f} are possible; "
            "look for other work on these cores, and for too little shared memory (/dev/shm)"
        )
    if comes < works:
        name = "read" if rate["read"] < HALF * rate["store"] else "store"
        cure = "a cache on this machine's disk (data.cache)" if remote else "a faster disk"
        return (
            name,
            f"{name}: {comes:.0f} images/s read, {works:.0f} could be decoded and cropped; use {cure}{smaller}",
        )
    name = "decode" if rate["decode"] < rate["crop"] else "crop"
    free = cores - processes
    cure = f"more of the {cores} cores (data.workers)" if free > 0 else "more cores, or fewer or smaller views"
    return name, (
        f"{name}: a core decodes and crops {core:.0f} images/s, {comes:.0f} images/s are read; use {cure}{smaller}"
    )
