"""A node's cache: fetched once whoever asks, bounded, the least recently used first, whole or not there."""

import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from eagleray.base.errors import UserError
from eagleray.storage import block_cache
from eagleray.storage.blob import Blob
from eagleray.storage.block_cache import Cache

SHARD = Blob("s3://b/x.tar", 10**6, "s3:tag")
SIZE = 1000


def content(begin: int) -> bytes:
    return bytes([begin % 251]) * SIZE


class Fetch:
    """Counts what is fetched."""

    def __init__(self, begin: int, delay: float = 0.0) -> None:
        self.begin, self.delay, self.times = begin, delay, 0

    def __call__(self) -> memoryview:
        self.times += 1
        time.sleep(self.delay)
        return memoryview(content(self.begin))


def get(cache: Cache, begin: int, fetch: Callable[[], memoryview] | None = None, blob: Blob = SHARD) -> bytes:
    return bytes(cache.get(blob, begin, begin + SIZE, fetch or Fetch(begin)))


def refused() -> memoryview:
    raise AssertionError("it is fetched again")


def kept(folder: Path) -> int:
    """Bytes, all blocks being of one size; files may go while we count."""
    return SIZE * len(list(folder.glob("*.block")))


def test_the_second_time_nothing_is_fetched(tmp_path: Path) -> None:
    assert (SHARD, 5, 5 + SIZE) not in Cache(tmp_path, 10**6)
    assert get(Cache(tmp_path, 10**6), 5) == content(5)
    again = Cache(tmp_path, 10**6)
    assert (SHARD, 5, 5 + SIZE) in again
    assert get(again, 5, refused) == content(5)


def test_another_range_tag_or_shard_is_another_block(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 10**6)
    get(cache, 5)
    for begin, blob in ((6, SHARD), (5, Blob(SHARD.url, SHARD.size, "s3:new")), (5, Blob("s3://b/y.tar", SHARD.size))):
        fetch = Fetch(begin)
        get(cache, begin, fetch, blob)
        assert fetch.times == 1


def test_the_least_recently_used_make_way_and_the_limit_holds(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 5 * SIZE)
    for i in range(5):
        get(cache, i)
        os.utime(cache._path(SHARD, i, i + SIZE), (i, i))
    get(cache, 0, refused)  # used again
    for i in range(5, 8):
        get(cache, i)
        assert kept(tmp_path) <= 5 * SIZE
    there = [i for i in range(8) if (SHARD, i, i + SIZE) in cache]
    assert there[0] == 0
    assert there[-3:] == [5, 6, 7]
    assert 1 not in there


def test_a_block_larger_than_the_limit_is_passed_on(tmp_path: Path) -> None:
    assert get(Cache(tmp_path, SIZE - 1), 3) == content(3)
    assert kept(tmp_path) == 0


@pytest.mark.parametrize("damage", [b"", b"\0" * (SIZE - 1)])
def test_a_file_of_another_length_is_fetched_again(tmp_path: Path, damage: bytes) -> None:
    cache = Cache(tmp_path, 10**6)
    get(cache, 1)
    cache._path(SHARD, 1, 1 + SIZE).write_bytes(damage)
    fetch = Fetch(1)
    assert get(cache, 1, fetch) == content(1)
    assert fetch.times == 1


def test_what_is_dropped_is_fetched_again(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 10**6)
    get(cache, 1)
    cache.drop(SHARD, 1, 1 + SIZE)
    fetch = Fetch(1)
    get(cache, 1, fetch)
    assert fetch.times == 1


def test_readers_that_ask_at_once_fetch_once(tmp_path: Path) -> None:
    fetch = Fetch(2, delay=0.2)
    threads = [threading.Thread(target=get, args=(Cache(tmp_path, 10**6), 2, fetch)) for _ in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert fetch.times == 1


def test_a_failed_fetch_keeps_nothing_and_lets_the_next_one_try(tmp_path: Path) -> None:
    def fail() -> memoryview:
        raise ConnectionError

    cache = Cache(tmp_path, 10**6)
    with pytest.raises(ConnectionError):
        get(cache, 4, fail)
    assert get(cache, 4) == content(4)


def churn(folder: Path, seed: int) -> None:
    cache = Cache(folder, 20 * SIZE)
    for i in range(10**6):
        begin = (i * 7 + seed) % 60
        assert get(cache, begin) == content(begin)


def test_processes_that_are_killed_while_they_write_leave_it_whole_and_bounded(tmp_path: Path) -> None:
    """Twelve times SIGKILL at any moment, beside processes that go on."""
    context = multiprocessing.get_context("fork")
    steady = [context.Process(target=churn, args=(tmp_path, s), daemon=True) for s in range(2)]
    for p in steady:
        p.start()
    for i in range(12):
        victim = context.Process(target=churn, args=(tmp_path, i), daemon=True)
        victim.start()
        time.sleep(0.02 + 0.013 * i)
        assert victim.pid
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
        assert kept(tmp_path) <= 20 * SIZE
    assert all(p.is_alive() for p in steady)
    for p in steady:
        p.kill()
        p.join()
    cache = Cache(tmp_path, 20 * SIZE)
    for begin in range(60):
        assert get(cache, begin) == content(begin)
    assert kept(tmp_path) <= 20 * SIZE


def test_a_part_that_nobody_finishes_is_cleared_away(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 3 * SIZE)
    left = tmp_path / f"{'0' * 32}.part"
    left.write_bytes(b"x" * SIZE)
    os.utime(left, (0, 0))
    for i in range(4):
        get(cache, i)
    assert not left.exists()


def test_a_full_disk_makes_it_slower_not_shorter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    cache = Cache(tmp_path, 10**6)
    monkeypatch.setattr(Path, "write_bytes", full)
    assert get(cache, 1) == content(1)
    assert "cannot cache a block: No space left on device" in caplog.text
    assert kept(tmp_path) == 0


def test_a_folder_that_is_deleted_meanwhile_makes_it_slower_not_shorter(tmp_path: Path) -> None:
    """As by a job's epilogue, or by what tidies up temporary files."""
    cache = Cache(tmp_path / "c", 10**6)
    assert get(cache, 5) == content(5)
    shutil.rmtree(tmp_path / "c")
    assert get(cache, 5) == content(5)


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"data\.cache=.*/file/x: cannot be written: Not a directory"):
        Cache(tmp_path / "file" / "x", 10**6)


def test_a_reader_does_not_wait_as_long_as_the_outage_that_another_meets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_cache, "STRIPES", 1)
    monkeypatch.setattr(block_cache, "WAIT", 0.1)
    begun, over = threading.Event(), threading.Event()

    def away() -> memoryview:
        begun.set()
        assert over.wait(60)
        return memoryview(content(1))

    other = threading.Thread(target=get, args=(Cache(tmp_path, 10**6), 1, away))
    other.start()
    assert begun.wait(60)
    assert get(Cache(tmp_path, 10**6), 2) == content(2)
    over.set()
    other.join()


def test_a_damaged_block_that_cannot_be_deleted_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise OSError(30, "Read-only file system")

    cache = Cache(tmp_path, 10**6)
    get(cache, 1)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        cache.drop(SHARD, 1, 1 + SIZE)
    assert "cannot delete a damaged block: Read-only file system" in caplog.text
