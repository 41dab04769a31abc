"""Readers of the same images, each served from a process of its own to `streaming.py`: ours, raw GETs, WebDataset and
mosaicml-streaming.

A request is a line of JSON on stdin, its answer one on stdout: seconds, images and bytes. The clock runs from the first
sample that is asked for to the last one that is handed over; before it packages are imported and indexes read, and
after it threads are ended. The rivals read in the order in which the images are stored, which is their fastest; ours
reads in the shuffled order of training.
"""

import collections
import io
import itertools
import json
import os
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from unittest import mock

import common
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from eagleray.config.view import View
from eagleray.data.decode import decode
from eagleray.views import sampling
from eagleray.views.crop import crop
from eagleray.views.sampling import Views

VIEWS = Views.of([View(size=224, count=2)])
ENOUGH = 2**40  # bytes: nothing is evicted
FIRST_LANES = 2  # of the reader whose first batch is timed: it waits for a block of each lane

Bytes = bytes | memoryview


@dataclass(frozen=True)
class Task:
    """What all of them read, and with how much of the machine."""

    shards: list[str]  # URLs of the tars
    mds: str  # URL of the same images in mosaicml-streaming's format
    images: int
    batch: int
    lanes: int
    connections: int  # GETs at a time, where a reader lets itself be told
    workers: int  # loader processes, where images are decoded


class Turn(NamedTuple):
    """How an epoch is read."""

    number: int = 0  # of the round; ours and the crops differ from one to the next
    folder: str = ""  # what has been read before is there, or will be; empty: everything comes from the server
    middle: bool = False  # begin in the middle of the epoch


class Reader(Protocol):
    def samples(self, turn: Turn) -> Iterable[Bytes]:
        """The image files of an epoch; what the clock shall see happens while they are iterated over."""

    def crops(self, turn: Turn) -> IterableDataset[Any]:
        """For a loader process: its share of the epoch, decoded and cropped."""


class Range(NamedTuple):
    url: str
    start: int
    length: int


class Run(NamedTuple):
    """Neighbouring samples of a block, `last` excluded."""

    first: int
    last: int


class Ours:
    def __init__(self, task: Task) -> None:
        from eagleray.data.index import open_index

        self.task, self.index = task, open_index(task.shards, note=common.note)

    def stream(self, folder: str, lanes: int) -> Any:
        from eagleray.data.reader import Stream
        from eagleray.storage.block_cache import Cache

        stream = partial(Stream, self.index, VIEWS, seed=0, lanes=lanes, batch=self.task.batch)
        return stream(cache=Cache(Path(folder), ENOUGH)) if folder else stream()

    def samples(self, turn: Turn) -> Iterable[Bytes]:
        stream = self.stream(turn.folder, FIRST_LANES if turn.middle else self.task.lanes)
        steps = stream.steps_per_epoch
        start = turn.number * steps + (steps // 2 if turn.middle else 0)
        return (data for _, data in stream.samples(range(stream.lanes), start=start, stop=(turn.number + 1) * steps))

    def crops(self, turn: Turn) -> IterableDataset[Any]:
        return Parts(self.stream(turn.folder, self.task.lanes), turn.number)

    def runs(self, epoch: int) -> list[list[Run]]:
        """What each lane reads in an epoch."""
        from eagleray.data.order import Epoch

        order = Epoch.of(self.index.block_sizes, seed=0, epoch=epoch)
        lanes = [order.lane(n, lanes=self.task.lanes, batch=self.task.batch) for n in range(self.task.lanes)]
        starts = self.index.starts.tolist()
        runs = [[lane[i] for i in range(len(lane))] for lane in lanes]
        return [[Run(starts[r.block] + r.first, starts[r.block] + r.last) for r in lane] for lane in runs]

    def range(self, run: Run) -> Range:
        index = self.index
        begin, end = index.offset[run.first], index.offset[run.last - 1] + index.size[run.last - 1]
        return Range(index.shards[index.shard[run.first]].url, int(begin), int(end - begin))

    def fetched(self, readers: int) -> float:
        """Bytes that one epoch without a cache fetches, over the bytes of the tars that are in it."""
        from eagleray.data.order import lanes_of
        from eagleray.storage import store

        lengths: list[int] = []
        place = store.store(self.task.shards[0])
        honest = place.read

        def read(url: str, start: int, length: int, **options: Any) -> Any:
            lengths.append(length)
            return honest(url, start, length, **options)

        stream = self.stream("", self.task.lanes)
        with mock.patch.object(place, "read", read):
            for reader in range(readers):
                lanes = lanes_of(stream.lanes, reader=reader, readers=readers)
                collections.deque(stream.samples(lanes, start=0, stop=stream.steps_per_epoch), maxlen=0)
        share = stream.steps_per_epoch * stream.batch / len(self.index)
        return sum(lengths) / (share * sum(b.size for b in self.index.shards))


class Raw(Ours):
    """Ours without anything of ours but the ranges."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        import boto3
        from botocore.config import Config

        self.client = boto3.client("s3", config=Config(max_pool_connections=task.connections))

    def samples(self, turn: Turn) -> Iterable[Bytes]:
        in_turn = itertools.chain.from_iterable(itertools.zip_longest(*self.runs(turn.number)))
        return self.received([self.range(run) for run in in_turn if run])

    def received(self, ranges: list[Range]) -> Iterator[bytes]:
        with ThreadPoolExecutor(self.task.connections) as pool:
            yield from pool.map(self.get, ranges)

    def get(self, what: Range) -> bytes:
        bucket, _, key = what.url.removeprefix("s3://").partition("/")
        span = f"bytes={what.start}-{what.start + what.length - 1}"
        return self.client.get_object(Bucket=bucket, Key=key, Range=span)["Body"].read()  # type: ignore[no-any-return]

    def block(self) -> Iterator[bytes]:
        """One block, alone."""
        yield self.get(self.range(Run(*self.index.starts[:2].tolist())))


class WebDataset:
    def __init__(self, task: Task) -> None:
        import webdataset

        self.task = task
        self.clients: dict[int, Any] = {}  # by process: loader processes would read from each other's connections
        webdataset.gopen_schemes["s3"] = self.opened

    @property
    def client(self) -> Any:
        import boto3

        return self.clients.get(os.getpid()) or self.clients.setdefault(os.getpid(), boto3.client("s3"))

    def opened(self, url: str, mode: str = "rb", bufsize: int = 8192) -> Any:
        bucket, _, key = url.removeprefix("s3://").partition("/")
        # Read in large pieces, as tarfile asks for 10 kB at a time.
        return io.BufferedReader(self.client.get_object(Bucket=bucket, Key=key)["Body"], 2**20)

    def samples(self, turn: Turn) -> Iterable[Bytes]:
        from webdataset import WebDataset

        skipped = self.task.images // 2 if turn.middle else 0
        files = WebDataset(self.task.shards, shardshuffle=False, cache_dir=turn.folder or None)
        return (sample["jpg"] for sample in itertools.islice(files, skipped, None))

    def crops(self, turn: Turn) -> IterableDataset[Any]:
        return Cropped(lambda: self.samples(turn), turn)


class MosaicStreaming:
    def __init__(self, task: Task) -> None:
        sys.path.remove(str(Path(__file__).parent))  # whose streaming.py hides the package of that name
        import streaming  # noqa: F401

        self.task = task

    def samples(self, turn: Turn) -> Iterable[Bytes]:
        dataset = self.dataset(turn)
        return (sample["image"] for sample in dataset)

    def crops(self, turn: Turn) -> IterableDataset[Any]:
        dataset = self.dataset(turn)
        return Cropped(lambda: (sample["image"] for sample in dataset), turn)

    def dataset(self, turn: Turn) -> Any:
        from streaming import StreamingDataset  # type: ignore[attr-defined]
        from streaming.base.util import clean_stale_shared_memory

        clean_stale_shared_memory()  # of the data set before this one
        if not (local := turn.folder):
            self.spare = tempfile.TemporaryDirectory()  # it has to put its shards somewhere
            local = self.spare.name
        dataset = StreamingDataset(
            remote=self.task.mds,
            local=local,
            batch_size=self.task.batch,
            predownload=1024,  # more than a shard, or it would wait for each
        )
        if turn.middle:
            state = dataset.state_dict(self.task.images // 2, from_beginning=True)
            dataset.load_state_dict(state | {"epoch": 0})
        return dataset

    def write(self, source: str, destination: str) -> int:
        """The images of a folder of tars in MDS. Returns their number."""
        from streaming import MDSWriter  # type: ignore[attr-defined]

        images = 0
        with MDSWriter(out=destination, columns={"image": "bytes"}) as out:
            for path in sorted(Path(source).glob("*.tar")):
                with tarfile.open(path) as tar:
                    for member in tar:
                        if member.name.endswith(".jpg"):
                            out.write({"image": tar.extractfile(member).read()})  # type: ignore[union-attr]
                            images += 1
        return images


class Parts(IterableDataset[list[Tensor]]):
    """An epoch of ours as a loader process of ours makes it."""

    def __init__(self, stream: Any, epoch: int) -> None:
        self.stream, self.epoch = stream, epoch

    def __iter__(self) -> Iterator[list[Tensor]]:
        from eagleray.data.order import lanes_of

        info, steps = get_worker_info(), self.stream.steps_per_epoch
        lanes = (
            lanes_of(self.stream.lanes, reader=info.id, readers=info.num_workers) if info else range(self.stream.lanes)
        )
        for part in self.stream.parts(lanes, start=self.epoch * steps, stop=(self.epoch + 1) * steps):
            assert not part.error, part.error
            yield part.pixels[0].transpose(0, 1)


class Cropped(IterableDataset[Tensor]):
    """Image files through our decoder and our crops, so that only their way here differs."""

    def __init__(self, files: Callable[[], Iterable[Bytes]], turn: Turn) -> None:
        self.files, self.turn = files, turn

    def __iter__(self) -> Iterator[Tensor]:
        for number, data in enumerate(self.files()):
            image = decode(data)
            u = sampling.uniforms(len(VIEWS.views), seed=0, epoch=self.turn.number, sample=number)
            out = torch.empty(len(VIEWS.views), 3, 224, 224, dtype=torch.uint8)
            crop(image, sampling.crops(VIEWS, u, *image.shape[1:]), VIEWS.views, list(out))
            yield out


def measured(things: Iterable[Any]) -> dict[str, float]:
    """Image files, or batches (B, V, 3, S, S)."""
    images = size = 0
    begin = end = time.perf_counter()
    for thing in things:
        images += len(thing) if isinstance(thing, Tensor) else 1
        size += thing.nbytes if isinstance(thing, Tensor) else len(thing)
        end = time.perf_counter()
    return {"seconds": end - begin, "images": images, "bytes": size}


def answer(reader: Any, what: str, **given: Any) -> Any:
    if what in ("fetched", "write"):
        return getattr(reader, what)(**given)
    return measured(CLOCKED[what](reader, Turn(**given)))


def first(reader: Any, turn: Turn) -> Iterable[Bytes]:
    return itertools.islice(reader.samples(turn._replace(middle=True)), reader.task.batch)


def decoded(reader: Any, turn: Turn) -> Iterable[Tensor]:
    batch = None if isinstance(reader, Ours) else reader.task.batch
    loader = DataLoader(
        reader.crops(turn),
        batch_size=batch,
        num_workers=reader.task.workers,
        worker_init_fn=None if batch else reconnect,
    )
    return (batch for batch in loader)  # whose processes start when the first is asked for


def reconnect(_: int) -> None:
    """Give a forked process connections of its own: two processes on one get each other's answers."""
    from eagleray.storage import store
    from eagleray.storage.s3 import S3Store

    store.STORES["s3"] = S3Store()


CLOCKED: dict[str, Callable[[Any, Turn], Iterable[Any]]] = {
    "epoch": lambda reader, turn: reader.samples(turn),
    "block": lambda reader, _: reader.block(),
    "first": first,
    "decoded": decoded,
}


READERS = {"ours": Ours, "raw": Raw, "webdataset": WebDataset, "streaming": MosaicStreaming}


def main() -> None:
    torch.set_num_threads(1)
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what packages print is no answer
        reader = READERS[sys.argv[1]](Task(**json.loads(sys.argv[2])))
        for line in sys.stdin:
            print(json.dumps(answer(reader, **json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
