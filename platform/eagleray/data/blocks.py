"""Fetches blocks with several ranged reads at a time, and checks the checksum of every sample."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

from eagleray.data.checksum import crc32
from eagleray.data.decode import BadImage
from eagleray.data.index import Index, byte_range
from eagleray.data.order import Run
from eagleray.storage.block_cache import Cache
from eagleray.storage.retry import PATIENCE

T = TypeVar("T")
THREADS = 8  # requests at a time


class Pool:
    """A pool of daemon threads, which do not keep the process alive when a store hangs."""

    def __init__(self, threads: int) -> None:
        self.queue: SimpleQueue[Any] = SimpleQueue()
        self.open = True
        for _ in range(threads):
            threading.Thread(target=self._work, name="fetch", daemon=True).start()

    def submit(self, run: Callable[[], T]) -> "Future[T]":
        future: Future[T] = Future()
        self.queue.put((run, future))
        return future

    def close(self) -> None:
        """Drop the waiting calls; the threads end with their current ones."""
        self.open = False
        self.queue.put(None)

    def _work(self) -> None:
        while True:
            asked = self.queue.get()
            if not self.open:
                self.queue.put(None)  # for the next thread
                return
            run, future = asked
            try:
                future.set_result(run())
            except BaseException as e:
                future.set_exception(e)
            del asked, run, future  # not to keep a block while waiting


class _Bytes(NamedTuple):
    begin: int  # where in the shard
    data: memoryview


class Content(NamedTuple):
    """The bytes of a block's samples, whose checksums have been compared."""

    begin: int  # where in the shard
    data: memoryview
    wrong: set[int]  # the offsets of the images whose checksum is wrong


Pass = Callable[[Callable[[], Content]], Content]  # gets a block from another reader, or fetches it and passes it on


class Block:
    """The samples that one lane reads from a block, which are fetched in the background.

    Checksums are compared at every read, so that a sample whose bytes have changed is rejected in every epoch.
    """

    def __init__(self, fetcher: "Fetcher", run: Run, pool: Pool | None = None, through: Pass | None = None) -> None:
        """`through` gets the block where several readers share it, in a thread of `pool`."""
        self.fetcher, self.run = fetcher, run
        self.first = int(fetcher.index.starts[run.block]) + run.first
        last = self.first + run.last - run.first
        rows = fetcher.index.rows(self.first, last)
        self.spans = list(zip(rows.offset.tolist(), rows.size.tolist(), rows.crc.tolist(), strict=True))
        self.labels = rows.label.tolist()
        self.future = (pool or fetcher.pool).submit(lambda: through(self._fetch) if through else self._fetch())

    def _fetch(self) -> Content:
        """Fetch the bytes and compare the checksums. Runs in the thread that fetches the block."""
        f = self.fetcher
        begin, data = f.read_through_cache(self.run) if f.cache else f.read(self.first, self.first + len(self.spans))
        wrong = {at for at, size, crc in self.spans if crc32(data[at - begin : at - begin + size]) != crc}
        return Content(begin, data, wrong)

    def label(self, sample: int) -> int:
        """Return the class of a sample, -1 where it has none."""
        return self.labels[sample - self.first]  # type: ignore[no-any-return]

    def bytes(self, sample: int) -> memoryview:
        """Return an image's bytes as they were indexed. Raises BadImage when they have changed in the store."""
        offset, size, crc = self.spans[sample - self.first]
        begin, data, wrong = self.future.result()
        if offset not in wrong:
            return data[offset - begin : offset - begin + size]
        data = self.fetcher.read_again(self.run, sample)  # they may have changed in transit
        if crc32(data) == crc:
            return data
        raise BadImage(f"its bytes have changed since it was indexed: checksum {crc32(data):08x}, was {crc:08x}")


class Fetcher:
    """Fetches the blocks of an index from the store, by way of the node's cache if there is one."""

    def __init__(self, index: Index, *, cache: Cache | None, patience: float = PATIENCE) -> None:
        self.index, self.cache, self.patience = index, cache, patience
        self.pool = Pool(THREADS)

    def read(self, first: int, last: int) -> _Bytes:
        """Read the samples `first` to `last` (excluded) of a shard; a tar is read with one request."""
        begin, _ = byte_range(self.index.rows(first, last))
        return _Bytes(begin, self.index.read(first, last, patience=self.patience))

    def read_through_cache(self, run: Run) -> _Bytes:
        """Return the whole block of a run through the cache, because another lane may read the rest of the block."""
        assert self.cache is not None
        first, last = self._block(run)
        rows = self.index.rows(first, last)
        begin, end = byte_range(rows)
        return _Bytes(begin, self.cache.get(rows.blob, begin, end, lambda: self.read(first, last).data))

    def _block(self, run: Run) -> tuple[int, int]:
        return int(self.index.starts[run.block]), int(self.index.starts[run.block + 1])

    def read_again(self, run: Run, sample: int) -> memoryview:
        """Read one image from the store again, and delete its block from the cache."""
        if self.cache:
            rows = self.index.rows(*self._block(run))
            self.cache.drop(rows.blob, *byte_range(rows))
        return self.index.read(sample, sample + 1, patience=self.patience)
