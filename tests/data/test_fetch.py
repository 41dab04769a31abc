"""Blocks on their way: most urgent first, no byte twice, every sample checked."""

import threading
import time
import weakref
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data.pictures import write_shards

from eagleray.data import fetch as fetching
from eagleray.data import index_file
from eagleray.data import stream as streaming
from eagleray.data.cache import Cache
from eagleray.data.decode import BadImage
from eagleray.data.fetch import LATER, NOW, SOON, Fetcher, Pool, span
from eagleray.data.index import Index, open_index
from eagleray.data.order import Run
from eagleray.data.store import LocalStore
from eagleray.data.stream import Stream
from eagleray.views.draw import Views
from eagleray.views.view import View

SAMPLES = 160


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_file, "BLOCK", 32_768)


@pytest.fixture
def index(tmp_path: Path) -> Index:
    return open_index(str(write_shards(tmp_path / "shards", SAMPLES, 2)), note=lambda _: None)


@pytest.fixture
def reads(index: Index, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """First byte and end of what is read."""
    log: list[tuple[int, int]] = []
    honest = LocalStore.read

    def spy(self: LocalStore, url: str, start: int, length: int, **more: Any) -> memoryview:
        log.append((start, start + length))
        return honest(self, url, start, length, **more)

    monkeypatch.setattr(LocalStore, "read", spy)
    return log


def fetcher(index: Index, *, cache: Cache | None) -> Fetcher:
    out = Fetcher(index, cache=cache)
    out.pool.start(2)
    return out


def first_run(index: Index) -> Run:
    return Run(0, 0, int(index.block_sizes[0]))


def image(index: Index, sample: int) -> bytes:
    path = Path(index.shards[index.shard[sample]].url)
    return path.read_bytes()[index.offset[sample] :][: index.size[sample]]


def test_the_most_urgent_is_done_first_and_in_its_order() -> None:
    pool = Pool()
    pool.start(1)
    gate, done = threading.Event(), []
    pool.submit(NOW, gate.wait)
    futures = [
        pool.submit(urgency, lambda n=n: done.append(n))  # type: ignore[misc]
        for n, urgency in enumerate([LATER, SOON, NOW, LATER, NOW])
    ]
    gate.set()
    for f in futures:
        f.result(5)
    assert done == [2, 4, 1, 0, 3]


def test_what_fails_is_told_to_who_waits_and_the_pool_goes_on() -> None:
    pool = Pool()
    pool.start(1)

    def fail() -> None:
        raise KeyError("x")

    failed, after = pool.submit(NOW, fail), pool.submit(NOW, lambda: 5)
    with pytest.raises(KeyError):
        failed.result(5)
    assert after.result(5) == 5


def test_a_closed_pool_ends_its_threads_and_drops_what_waits() -> None:
    before = set(threading.enumerate())
    pool = Pool()
    pool.start(4)
    mine = set(threading.enumerate()) - before
    gate, begun = threading.Event(), threading.Barrier(5)
    busy = [pool.submit(NOW, lambda: begun.wait() >= 0 and gate.wait()) for _ in range(4)]
    begun.wait(5)
    waiting = pool.submit(NOW, lambda: pytest.fail("it is dropped"))
    pool.close()
    gate.set()
    assert all(b.result(5) for b in busy)
    for thread in mine:
        thread.join(5)
    assert len(mine) == 4
    assert not any(t.is_alive() for t in mine)
    assert not waiting.done()


def test_samples_that_are_needed_at_once_are_read_alone_and_no_byte_twice(
    index: Index, reads: list[tuple[int, int]]
) -> None:
    run = first_run(index)
    assert run.last > 12
    soon = [7, 2]
    block = fetcher(index, cache=None).block(run, soon=soon)
    assert all(bytes(block.bytes(s)) == image(index, s) for s in range(run.last))
    reads.sort()
    alone = [(int(index.offset[s]), int(index.offset[s] + index.size[s])) for s in sorted(soon)]
    assert reads[1] == alone[0]
    assert reads[3] == alone[1]
    assert len(reads) == 5
    assert all(a[1] <= b[0] for a, b in pairwise(reads))


def test_where_most_of_a_block_is_needed_at_once_it_is_read_whole(index: Index, reads: list[tuple[int, int]]) -> None:
    run = first_run(index)
    fetcher(index, cache=None).block(run, soon=list(range(run.last // 3))).bytes(0)
    assert reads == [span(index.rows(0, run.last))]


def damage(index: Index, sample: int) -> None:
    path = Path(index.shards[index.shard[sample]].url)
    data = bytearray(path.read_bytes())
    data[index.offset[sample] + index.size[sample] // 2] ^= 1
    path.write_bytes(data)


def test_bytes_that_changed_in_the_store_are_refused_and_only_they(index: Index) -> None:
    damage(index, 3)
    block = fetcher(index, cache=None).block(first_run(index))
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
    block = fetcher(index, cache=None).block(first_run(index))
    assert all(bytes(block.bytes(s)) == image(index, s) for s in range(10))
    assert reads[1:] == [(int(index.offset[3]), int(index.size[3]))]


def test_bytes_that_changed_in_the_cache_are_read_from_the_store(index: Index, tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache", 10**7)
    run = first_run(index)
    fetcher(index, cache=cache).block(run).bytes(0)
    [kept] = (tmp_path / "cache").glob("*.block")
    data = bytearray(kept.read_bytes())
    data[int(index.offset[3] - index.offset[0]) + 9] ^= 1
    kept.write_bytes(data)
    block = fetcher(index, cache=cache).block(run)
    assert all(bytes(block.bytes(s)) == image(index, s) for s in range(run.last))
    assert not kept.exists()  # and is fetched anew the next time


VIEWS = Views.of([View(size=8)])


def bytes_of_epochs(stream: Stream, epochs: int, start: int = 0) -> list[tuple[int, bytes]]:
    count = epochs * stream.steps_per_epoch * stream.batch
    return [(s, bytes(data)) for s, data in islice(stream.samples(range(stream.lanes), start=start), count)]


def test_a_second_epoch_from_a_warm_cache_fetches_nothing(
    index: Index, tmp_path: Path, reads: list[tuple[int, int]]
) -> None:
    cached = Stream(index, VIEWS, 0, 4, 12, Cache(tmp_path / "cache", 10**7))
    plain = Stream(index, VIEWS, 0, 4, 12)
    first = bytes_of_epochs(cached, 1)
    time.sleep(0.3)
    data = sum(end - begin for begin, end in {span(index.rows(a, b)) for a, b in blocks(index)})
    heads = sum(len(x) for _, x in first[:12])
    assert sum(end - begin for begin, end in reads) <= data + heads
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


def test_the_first_step_waits_for_its_own_samples_only(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one request at a time, nothing else is read before them, from any step on."""
    monkeypatch.setattr(streaming, "THREADS", 1)
    honest, log = LocalStore.read, []

    def read(self: LocalStore, url: str, start: int, length: int, **more: Any) -> memoryview:
        log.append((url, start, length))
        time.sleep(0.01)
        return honest(self, url, start, length, **more)

    monkeypatch.setattr(LocalStore, "read", read)
    stream = Stream(index, VIEWS, 0, 2, 4)
    for start in (0, 3, 7):
        log.clear()
        first = [s for s, _ in islice(stream.samples(range(2), start=start), 4)]
        rows = [index.rows(s, s + 1) for s in first]
        own = {(r.blob.url, int(r.offset[0]), int(r.size[0])) for r in rows}
        assert set(log[:4]) == own


def test_a_sample_of_a_repeated_source_is_read_as_often_with_other_crops(tmp_path: Path) -> None:
    from eagleray.data.source import Source

    write_shards(tmp_path / "a", 24, 2)
    write_shards(tmp_path / "b", 8, 1)
    sources = [Source(url=str(tmp_path / "a")), Source(url=str(tmp_path / "b"), repeat=3)]
    both = open_index(sources, note=lambda _: None)
    stream = Stream(both, VIEWS, 0, 2, 4)
    assert stream.steps_per_epoch == (24 + 3 * 8) // 4
    parts = list(islice(stream.parts(range(2), start=0), stream.steps_per_epoch))
    order = torch.cat([p.index for p in parts])
    assert np.bincount(order).tolist() == [1] * 24 + [3] * 8
    boxes = torch.cat([p.boxes[0] for p in parts])
    for sample in range(24, 32):
        assert len(boxes[order == sample].unique(dim=0)) == 3
    alone = list(islice(stream.parts(range(1, 2), start=5), 9))
    assert all(torch.equal(a.index, p.index[2:]) for a, p in zip(alone, parts[5:], strict=False))
