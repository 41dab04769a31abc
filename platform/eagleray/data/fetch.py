"""One fetcher per loader process: ranged reads side by side, the most urgent first, every sample checked."""

import itertools
import threading
import zlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import PriorityQueue
from typing import Any, NamedTuple, TypeVar

from eagleray.data import store
from eagleray.data.cache import Cache
from eagleray.data.decode import BadImage
from eagleray.data.index import Index, Rows
from eagleray.data.order import Run
from eagleray.data.retry import PATIENCE

T = TypeVar("T")
THREADS = 8  # requests at a time
NOW, SOON, LATER = range(3)  # urgencies: the first step's samples, the blocks they are in, the blocks after those


class Pool:
    """Threads that do what is most urgent first. They are daemons: a store that hangs shall not keep the process."""

    def __init__(self) -> None:
        self.queue: PriorityQueue[tuple[int, int, Any, Any]] = PriorityQueue()
        self.count = itertools.count()
        self.open = True

    def start(self, threads: int) -> None:
        """Begin, once all that is urgent is known."""
        for _ in range(threads):
            threading.Thread(target=self._work, name="fetch", daemon=True).start()

    def submit(self, urgency: int, run: Callable[[], T]) -> "Future[T]":
        future: Future[T] = Future()
        self.queue.put((urgency, next(self.count), run, future))
        return future

    def close(self) -> None:
        """End when the requests under way are done; what waits is dropped."""
        self.open = False
        self.queue.put((-1, next(self.count), None, None))

    def _work(self) -> None:
        while True:
            _, _, run, future = self.queue.get()
            if not self.open:
                self.queue.put((-1, next(self.count), None, None))  # for the next thread
                return
            try:
                future.set_result(run())
            except BaseException as e:
                future.set_exception(e)
            del run, future  # not to keep a block while waiting


class _Range(NamedTuple):
    begin: int  # where in the shard
    data: memoryview


class Block:
    """The samples of a run, on their way in one piece or in several."""

    def __init__(self, fetcher: "Fetcher", run: Run, first: int, rows: Rows) -> None:
        self.fetcher, self.run, self.first, self.rows = fetcher, run, first, rows
        self.cuts: list[int] = []  # first sample of each piece
        self.pieces: list[Future[_Range]] = []

    def bytes(self, sample: int) -> memoryview:
        """An image's bytes as they were indexed. Raises BadImage where the store has others by now."""
        row = sample - self.first
        offset, size, crc = (int(x[row]) for x in (self.rows.offset, self.rows.size, self.rows.crc))
        piece = self.pieces[bisect_right(self.cuts, sample) - 1].result()
        data = piece.data[offset - piece.begin : offset - piece.begin + size]
        if zlib.crc32(data) == crc:
            return data
        data = self.fetcher.again(self.run, self.rows, offset, size)  # it may have happened on the way
        if zlib.crc32(data) == crc:
            return data
        raise BadImage(f"its bytes have changed since it was indexed: checksum {zlib.crc32(data):08x}, was {crc:08x}")


class Fetcher:
    """Blocks of an index, from a node's cache where there is one."""

    def __init__(self, index: Index, *, cache: Cache | None, patience: float = PATIENCE) -> None:
        self.index, self.cache, self.patience = index, cache, patience
        self.pool = Pool()

    def block(self, run: Run, *, soon: Sequence[int] = (), urgency: int = LATER) -> Block:
        """Ask for the samples of a run. Those that are needed at once are fetched on their own, before the rest of
        their block; without a cache no byte is fetched twice for that."""
        start = int(self.index.starts[run.block])
        first, last = start + run.first, start + run.last
        block = Block(self, run, first, self.index.rows(first, last))
        whole = self.cache is not None
        alone = sorted(soon) if 4 * len(soon) < last - first and not (whole and self._kept(run)) else []
        urgency = NOW if soon and not alone else urgency
        kept = self.pool.submit(urgency, lambda: self._whole(run)) if whole else None
        at = first
        for sample in [*alone, last]:
            if at < sample:
                block.cuts.append(at)
                block.pieces.append(kept or self._submit(urgency, block, at, sample))
            if sample < last:
                block.cuts.append(sample)
                block.pieces.append(self._submit(NOW, block, sample, sample + 1))
            at = sample + 1
        return block

    def _submit(self, urgency: int, block: Block, first: int, last: int) -> "Future[_Range]":
        rows = self.index.rows(first, last)
        return self.pool.submit(urgency, lambda: self._read(rows))

    def _read(self, rows: Rows) -> _Range:
        begin, end = span(rows)
        blob = rows.blob
        read = store.store(blob.url).read
        return _Range(begin, read(blob.url, begin, end - begin, tag=blob.tag, patience=self.patience))

    def _whole(self, run: Run) -> _Range:
        """A block, of which a lane may use a part and another lane the rest, by way of the cache."""
        assert self.cache is not None
        rows = self._rows(run)
        return _Range(span(rows)[0], self.cache.get(rows.blob, *span(rows), lambda: self._read(rows).data))

    def _kept(self, run: Run) -> bool:
        rows = self._rows(run)
        return self.cache is not None and (rows.blob, *span(rows)) in self.cache

    def _rows(self, run: Run) -> Rows:
        return self.index.rows(int(self.index.starts[run.block]), int(self.index.starts[run.block + 1]))

    def again(self, run: Run, rows: Rows, offset: int, size: int) -> memoryview:
        """Bytes of one image from the store, whatever the cache has."""
        blob = rows.blob
        if self.cache:
            self.cache.drop(blob, *span(self._rows(run)))
        return store.store(blob.url).read(blob.url, offset, size, tag=blob.tag, patience=self.patience)


def span(rows: Rows) -> tuple[int, int]:
    """From the first byte of the first image to the last of the last."""
    return int(rows.offset[0]), int(rows.offset[-1] + rows.size[-1])
