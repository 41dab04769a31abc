"""Fetches blocks, ranges of neighbouring samples, by concurrent ranged reads, and verifies every sample's checksum."""

import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from eagleray.data.checksum import crc32
from eagleray.data.costs import BadImage
from eagleray.data.index import Index
from eagleray.data.kinds import TAR, byte_range, kind_of
from eagleray.storage.block_cache import Cache
from eagleray.storage.retry import PATIENCE

T = TypeVar("T")
THREADS = 8  # concurrent requests for blocks
PIECES = 32  # concurrent requests for pieces of blocks
WASTE = 0.05  # most bytes read in the gaps between selected images, as a fraction of the images' bytes


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
        if not self.open:
            future.cancel()
        return future

    def close(self) -> None:
        """Cancel the waiting calls. The threads end after their current calls."""
        self.open = False
        self.queue.put(None)

    def _work(self) -> None:
        while asked := self.queue.get():
            run, future = asked
            if not self.open:
                future.cancel()  # a thread of another pool may wait for this future
            elif future.set_running_or_notify_cancel():
                try:
                    future.set_result(run())
                except BaseException as e:
                    future.set_exception(e)
            del asked, run, future  # a block would stay in memory while the thread waits
        self.queue.put(None)  # the next thread has to end, too


class _Bytes(NamedTuple):
    begin: int  # offset in the shard
    data: memoryview


class Content(NamedTuple):
    """The bytes of a block's samples, and which samples have a wrong checksum."""

    begin: int  # offset of `data` in the shard; 0 if `data` is joined from pieces of the block
    data: memoryview
    wrong: set[int]  # offsets of images with wrong checksums, in the shard or, if pieces are joined, in `data`


Pass = Callable[[Callable[[], Content]], Content]  # fetches a block and passes it on, or gets it from another reader


class Block:
    """The samples of one block that a lane reads. They are fetched in the background.

    Checksums are compared at every read, so that a sample whose bytes have changed is rejected in every epoch."""

    def __init__(
        self, fetcher: "Fetcher", samples: NDArray[np.int64], pool: Pool | None = None, through: Pass | None = None
    ) -> None:
        """`samples` are ascending indices of samples in one block. If several readers share the lane, a thread of
        `pool` calls `through`, which fetches the block, or receives it from the reader that fetches it."""
        self.fetcher, self.samples = fetcher, samples
        first = int(samples[0])
        rows, mine = fetcher.index.rows(first, int(samples[-1]) + 1), samples - first
        offset, size = rows.offset[mine], rows.size[mine]
        kind = kind_of(rows.blob)
        if fetcher.selects and kind.apart:
            self.pieces = [slice(row, row + 1) for row in range(len(samples))]
        else:
            between = fetcher.selects and not kind.whole
            self.pieces = pieces(samples, offset, size) if between else [slice(0, len(samples))]
        at = packed(self.pieces, offset, size) if fetcher.selects else offset
        self.spans = list(zip(at.tolist(), size.tolist(), rows.crc[mine].tolist(), strict=True))
        self.labels = rows.label[mine].tolist()
        self.rows = {sample: row for row, sample in enumerate(samples.tolist())}
        self.future = (pool or fetcher.pool).submit(lambda: through(self._fetch) if through else self._fetch())

    def _fetch(self) -> Content:
        """Fetch the bytes and compare the checksums. This runs in a thread of the pool."""
        if self.fetcher.selects:
            begin, data = 0, self.fetcher.read_pieces([self._ends(piece) for piece in self.pieces])
        else:
            begin, data = self.fetcher.read_block(*self._ends(self.pieces[0]))
        wrong = {at for at, size, crc in self.spans if crc32(data[at - begin : at - begin + size]) != crc}
        return Content(begin, data, wrong)

    def _ends(self, piece: slice) -> tuple[int, int]:
        """Return the range of samples of a piece: first, and last (excluded)."""
        return int(self.samples[piece.start]), int(self.samples[piece.stop - 1]) + 1

    def label(self, sample: int) -> int:
        """Return the class of a sample, or -1 if it has none."""
        return self.labels[self.rows[sample]]  # type: ignore[no-any-return]

    def bytes(self, sample: int) -> memoryview:
        """Return an image's bytes as they were indexed. Raises BadImage when they have changed in the store."""
        row = self.rows[sample]
        at, size, crc = self.spans[row]
        begin, data, wrong = self.future.result()
        if at not in wrong:
            return data[at - begin : at - begin + size]
        piece = next(p for p in self.pieces if row < p.stop)
        data = self.again = self.fetcher.read_again(sample, *self._ends(piece), data.obj)  # may be wrong by transit
        if crc32(data) == crc:
            return data
        raise BadImage(f"its bytes have changed since it was indexed: checksum {crc32(data):08x}, was {crc:08x}")


def pieces(samples: NDArray[np.int64], offset: NDArray[np.int64], size: NDArray[np.int64]) -> list[slice]:
    """Group samples (n,) into slices, each read with one request. Neighbours in the shard share a slice. So do samples
    around the smallest gaps, as long as these gaps sum to at most WASTE times the bytes of the images.

    The images begin at `offset` (n,) in the shard and have `size` (n,) bytes."""
    gap = offset[1:] - (offset + size)[:-1]
    apart = np.diff(samples) > 1
    smallest = np.flatnonzero(apart)[np.argsort(gap[apart], kind="stable")]
    closed = smallest[np.cumsum(gap[smallest]) <= WASTE * size.sum()]
    apart[closed] = False
    edges = [0, *(np.flatnonzero(apart) + 1).tolist(), len(samples)]
    return [slice(*ends) for ends in itertools.pairwise(edges)]


def packed(parts: Sequence[slice], offset: NDArray[np.int64], size: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the offset of each image (n,) in the joined bytes of all `parts`, the slices that `pieces` returns."""
    at, end = np.empty_like(offset), 0
    for part in parts:
        at[part] = offset[part] - offset[part.start] + end
        end += int(offset[part.stop - 1] + size[part.stop - 1] - offset[part.start])
    return at


class Fetcher:
    """Fetches the blocks of an index from the store, through the machine's cache if there is one.

    With `selects`, it reads hardly more than the requested samples. Otherwise it puts whole blocks into the cache, as
    another lane may read the rest of a block."""

    def __init__(self, index: Index, *, cache: Cache | None, patience: float = PATIENCE, selects: bool = False) -> None:
        self.index, self.cache, self.patience, self.selects = index, cache, patience, selects
        self.pool = Pool(THREADS)
        asks_often = selects or any(kind_of(blob) is not TAR for blob in index.shards)
        self.hands = Pool(PIECES) if asks_often else None

    def read_block(self, first: int, last: int) -> _Bytes:
        """Return the bytes of the samples `first` to `last` (excluded) of a block, or of the whole block if there is a
        cache. A block of a tar is read with one request."""
        if self.cache:
            first, last = self._block(first)
        return _Bytes(byte_range(self.index.rows(first, last))[0], self.read_piece(first, last))

    def read_piece(self, first: int, last: int) -> memoryview:
        """Return a block's bytes from sample `first` to `last` (excluded), including those in gaps between images."""
        if not self.cache:
            return self._read(first, last)
        rows = self.index.rows(first, last)
        return self.cache.get(rows.blob, *byte_range(rows), lambda: self._read(first, last))

    def read_pieces(self, ends: Sequence[tuple[int, int]]) -> memoryview:
        """Read pieces concurrently and join their bytes. `ends` are each piece's first and last (excluded) sample."""
        return memoryview(b"".join(self._each(lambda each: self.read_piece(*each), ends)))

    def _read(self, first: int, last: int, stale: Any = None) -> memoryview:
        # With `selects`, this runs in a thread of `hands`. Waiting for another of these threads could deadlock.
        each = map if self.selects else self._each
        return self.index.read(first, last, patience=self.patience, each=each, stale=stale)

    def _each(self, function: Callable[[Any], T], things: Iterable[Any]) -> Iterator[T]:
        """Map a function over things, concurrently in the threads of `hands` if there are any."""
        if not self.hands:
            return map(function, things)
        calls = [self.hands.submit(functools.partial(function, thing)) for thing in things]
        return (call.result() for call in calls)

    def close(self) -> None:
        """Cancel the waiting requests."""
        self.pool.close()
        if self.hands:
            self.hands.close()

    def _block(self, sample: int) -> tuple[int, int]:
        """Return the range of samples of the block that holds this sample: first, and last (excluded)."""
        block = int(np.searchsorted(self.index.starts, sample, "right")) - 1
        return int(self.index.starts[block]), int(self.index.starts[block + 1])

    def read_again(self, sample: int, first: int, last: int, stale: Any) -> memoryview:
        """Read one image from the store again, and delete the cached bytes that contain it: with `selects`, the piece
        of the samples `first` to `last` (excluded), otherwise the image's block. For `stale` see `Means`."""
        if self.cache:
            rows = self.index.rows(*((first, last) if self.selects else self._block(sample)))
            self.cache.drop(rows.blob, *byte_range(rows))
        return self._read(sample, sample + 1, stale)
