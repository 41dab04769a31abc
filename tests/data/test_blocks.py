"""Blocks on their way: what a step needs first, two for every lane, and every sample checked."""

import threading
import weakref
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.pictures import write_shards
from numpy.typing import NDArray

from eagleray.config.view import View
from eagleray.data import blocks as fetching
from eagleray.data import index_file
from eagleray.data.blocks import Block, Fetcher, Pool
from eagleray.data.decode import BadImage
from eagleray.data.index import Index, open_index
from eagleray.data.kinds import byte_range
from eagleray.data.reader import Stream
from eagleray.storage.block_cache import Cache
from eagleray.storage.store import LocalStore
from eagleray.views.sampling import Views

SAMPLES = 160


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_file, "BLOCK", 32_768)


@pytest.fixture
def index(tmp_path: Path) -> Index:
    return open_index(str(write_shards(tmp_path / "shards", SAMPLES, 2)), note=lambda _: None)


class Reads(list[tuple[int, int]]):
    """First byte and end of what is read."""

    def __init__(self) -> None:
        self.before = set(threading.enumerate())

    def wait(self) -> None:
        """Wait for the reads that streams had begun when they were closed."""
        for thread in set(threading.enumerate()) - self.before:
            thread.join(60)
            assert not thread.is_alive()


@pytest.fixture
def reads(index: Index, monkeypatch: pytest.MonkeyPatch) -> Reads:
    log = Reads()
    honest = LocalStore.read

    def spy(self: LocalStore, url: str, start: int, length: int, **more: Any) -> memoryview:
        log.append((start, start + length))
        return honest(self, url, start, length, **more)

    monkeypatch.setattr(LocalStore, "read", spy)
    return log


def first_block(index: Index) -> NDArray[np.int64]:
    return np.arange(index.block_sizes[0])


def image(index: Index, sample: int) -> bytes:
    path = Path(index.shards[index.shard[sample]].url)
    return path.read_bytes()[index.offset[sample] :][: index.size[sample]]


def test_what_fails_is_told_to_who_waits_and_the_pool_goes_on() -> None:
    pool = Pool(1)

    def fail() -> None:
        raise KeyError("x")

    failed, after = pool.submit(fail), pool.submit(lambda: 5)
    with pytest.raises(KeyError):
        failed.result(60)
    assert after.result(60) == 5


def test_a_closed_pool_ends_its_threads_and_cancels_what_waits() -> None:
    before = set(threading.enumerate())
    pool = Pool(4)
    mine = set(threading.enumerate()) - before
    gate, begun = threading.Event(), threading.Barrier(5)
    busy = [pool.submit(lambda: begun.wait() >= 0 and gate.wait()) for _ in range(4)]
    begun.wait(60)
    waiting = pool.submit(lambda: pytest.fail("it is cancelled"))
    pool.close()
    gate.set()
    assert all(b.result(60) for b in busy)
    for thread in mine:
        thread.join(60)
    assert len(mine) == 4
    assert not any(t.is_alive() for t in mine)
    assert waiting.cancelled()
    assert pool.submit(lambda: pytest.fail("it is closed")).cancelled()


def test_a_fetcher_that_is_closed_while_it_reads_pieces_ends_its_threads(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that wait for pieces that nobody reads any more."""
    monkeypatch.setattr(fetching, "PIECES", 1)
    before, gate, begun = set(threading.enumerate()), threading.Event(), threading.Event()
    monkeypatch.setattr(LocalStore, "read", lambda *_, **__: begun.set() or (gate.wait() and memoryview(b"")))
    fetcher = Fetcher(index, cache=None, selects=True)
    Block(fetcher, first_block(index)[::3])
    assert begun.wait(60)
    fetcher.close()
    gate.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive()


def damage(index: Index, sample: int) -> None:
    path = Path(index.shards[index.shard[sample]].url)
    data = bytearray(path.read_bytes())
    data[index.offset[sample] + index.size[sample] // 2] ^= 1
    path.write_bytes(data)


def test_bytes_that_changed_in_the_store_are_refused_and_only_they(index: Index) -> None:
    damage(index, 3)
    block = Block(Fetcher(index, cache=None), first_block(index))
    for sample in range(10):
        if sample == 3:
            with pytest.raises(BadImage, match="its bytes have changed since it was indexed: checksum"):
                block.bytes(sample)
        else:
            assert bytes(block.bytes(sample)) == image(index, sample)


def test_bytes_that_changed_on_the_way_are_read_again_once(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, reads = LocalStore.read, []

    def read(self: LocalStore, url: str, start: int, length: int, **more: Any) -> memoryview:
        data = honest(self, url, start, length, **more)
        if not reads:
            data[int(index.offset[3]) - start + 9] ^= 1
        reads.append((start, length))
        return data

    monkeypatch.setattr(LocalStore, "read", read)
    block = Block(Fetcher(index, cache=None), first_block(index))
    assert all(bytes(block.bytes(s)) == image(index, s) for s in range(10))
    assert reads[1:] == [(int(index.offset[3]), int(index.size[3]))]


def test_bytes_that_changed_in_the_cache_are_read_from_the_store(index: Index, tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache", 10**7)
    samples = first_block(index)
    Block(Fetcher(index, cache=cache), samples).bytes(0)
    [kept] = (tmp_path / "cache").glob("*.block")
    data = bytearray(kept.read_bytes())
    data[int(index.offset[3] - index.offset[0]) + 9] ^= 1
    kept.write_bytes(data)
    block = Block(Fetcher(index, cache=cache), samples)
    assert all(bytes(block.bytes(s)) == image(index, s) for s in samples.tolist())
    assert not kept.exists()  # and is fetched anew the next time


VIEWS = Views.of([View(size=8)])


def bytes_of_epochs(stream: Stream, epochs: int, start: int = 0) -> list[tuple[int, bytes]]:
    count = epochs * stream.steps_per_epoch * stream.batch
    return [(s, bytes(data)) for s, data in islice(stream.samples(range(stream.lanes), start=start), count)]


def test_a_second_epoch_from_a_warm_cache_fetches_nothing(index: Index, tmp_path: Path, reads: Reads) -> None:
    cached = Stream(index, VIEWS, 0, 4, 12, Cache(tmp_path / "cache", 10**7))
    plain = Stream(index, VIEWS, 0, 4, 12)
    first = bytes_of_epochs(cached, 1)
    reads.wait()
    data = sum(end - begin for begin, end in {byte_range(index.rows(a, b)) for a, b in blocks(index)})
    assert sum(end - begin for begin, end in reads) == data
    reads.clear()
    again = bytes_of_epochs(cached, 2)
    assert reads == []
    assert again == bytes_of_epochs(plain, 2)
    assert again[: len(first)] == first


def blocks(index: Index) -> list[tuple[int, int]]:
    return list(zip(index.starts[:-1].tolist(), index.starts[1:].tolist(), strict=True))


def test_a_reader_holds_two_blocks_of_each_lane_and_no_more(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound on memory that the documentation states, over three epochs."""
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    most = 0
    honest = fetching.Block.__init__

    def init(self: fetching.Block, *given: Any) -> None:
        honest(self, *given)
        alive.add(self)

    monkeypatch.setattr(fetching.Block, "__init__", init)
    stream = Stream(index, VIEWS, 0, 4, 12)
    assert len(index.block_sizes) > 4
    for _ in islice(stream.samples(range(4), start=0), 3 * SAMPLES):
        most = max(most, len(alive))
    assert 4 < most <= 2 * 4 + 1  # and for a moment the one that was just used up


def test_the_first_step_of_all_lanes_is_asked_for_before_anything_else(
    index: Index, reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "THREADS", 1)
    stream = Stream(index, VIEWS, 0, 4, 12)
    for start in (0, 3, 7):
        reads.wait()  # or the last read of the start before would come first
        reads.clear()
        first = {s for s, _ in islice(stream.samples(range(4), start=start), 12)}
        needed = [any(begin <= index.offset[s] < end for s in first) for begin, end in reads]
        assert all(needed[:4])


def test_nothing_is_read_for_steps_after_the_last(index: Index, reads: Reads) -> None:
    stream = Stream(index, VIEWS, 0, 4, 12)
    got = list(stream.samples(range(4), start=1, stop=3))
    assert [s for s, _ in got] == [s for s, _ in bytes_of_epochs(stream, 1)][12:36]
    own = {s for s, _ in got}
    reads.wait()  # for the epoch above, which reads ahead
    reads.clear()
    list(stream.samples(range(4), start=1, stop=3))
    reads.wait()
    assert all(any(begin <= index.offset[s] < end for s in own) for begin, end in reads)
    assert len(reads) <= 2 * 4


def test_a_sample_of_a_repeated_source_is_read_as_often_with_other_crops(tmp_path: Path) -> None:
    from eagleray.config.source import Source

    write_shards(tmp_path / "a", 24, 2)
    write_shards(tmp_path / "b", 8, 1)
    sources = [Source(url=str(tmp_path / "a")), Source(url=str(tmp_path / "b"), repeat=3)]
    both = open_index(sources, note=lambda _: None)
    stream = Stream(both, VIEWS, 0, 2, 4)
    assert stream.steps_per_epoch == (24 + 3 * 8) // 4
    parts = list(islice(stream.parts(range(2), start=0), stream.steps_per_epoch))
    order = torch.cat([p.index for p in parts])
    assert np.bincount(order).tolist() == [1] * 24 + [3] * 8
    params = torch.cat([p.params[0] for p in parts])
    for sample in range(24, 32):
        assert len(params[order == sample].unique(dim=0)) == 3
    alone = list(islice(stream.parts(range(1, 2), start=5), 9))
    assert all(torch.equal(a.index, p.index[2:]) for a, p in zip(alone, parts[5:], strict=False))
