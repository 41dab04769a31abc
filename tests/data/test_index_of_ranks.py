"""Rank 0 opens the index for all ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.bucket import CountingBucket
from helpers.pictures import write_shards

from eagleray.base import dist
from eagleray.data import index_file
from eagleray.data.index import Index, open_index
from eagleray.data.index_of_ranks import open_on_all
from eagleray.storage import store


class TwoRanks:
    """Two ranks of two machines, which open an index one after the other."""

    def __init__(self, patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.patch, self.tmp_path, self.rank = patch, tmp_path, 0
        self.answers: list[Any] = []
        patch.setattr(dist, "size", lambda: 2)
        patch.setattr(dist, "from_rank_zero", self.from_rank_zero)

    def open(self, rank: int, open_here: Callable[[], Index], missing: list[list[int]]) -> Index:
        self.rank, self.asked = rank, 0
        self.patch.setattr(dist, "gather_objects", lambda x: missing)
        self.patch.setenv("XDG_CACHE_HOME", str(self.tmp_path / f"machine{rank}"))
        return open_on_all(open_here)

    def from_rank_zero(self, get: Callable[[], Any]) -> Any:
        if self.rank == 0:
            self.answers.append(get())
        self.asked += 1
        return self.answers[self.asked - 1]


def never() -> Index:
    raise AssertionError("a rank other than 0 opened the index itself")


def assert_same(ours: Index, theirs: Index) -> None:
    assert ours.shards == theirs.shards
    assert ours.bad == theirs.bad
    assert np.array_equal(ours.starts, theirs.starts)
    assert np.array_equal(ours.crc, theirs.crc)
    assert [ours.key(i) for i in range(0, len(ours), 7)] == [theirs.key(i) for i in range(0, len(ours), 7)]


def test_an_index_in_a_bucket_is_fetched_once_per_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = CountingBucket(tmp_path)
    monkeypatch.setitem(store.STORES, "s3", bucket)
    write_shards(tmp_path / "data", 30, 3, broken=(4,))
    ranks = TwoRanks(monkeypatch, tmp_path)
    first = ranks.open(0, lambda: open_index("s3://data", note=lambda _: None), [[], []])
    for again in range(2):
        before = bucket.requests.total()
        second = ranks.open(1, never, [[], []])
        assert bucket.requests.total() - before == (0 if again else 1)
    assert_same(second, first)


def test_an_index_that_only_rank_0_has_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of shards in a folder where nothing can be written, when a run has no shared folder either."""
    write_shards(tmp_path / "data", 30, 3)
    honest = store.LocalStore.put

    def put(self: store.LocalStore, url: str, source: Path, **options: Any) -> None:
        if Path(url).parent == tmp_path / "data":
            raise PermissionError(13, "Permission denied")
        honest(self, url, source, **options)

    monkeypatch.setattr(store.LocalStore, "put", put)
    ranks = TwoRanks(monkeypatch, tmp_path)
    spare = tmp_path / "spare"
    first = ranks.open(0, lambda: open_index(str(tmp_path / "data"), spare, note=lambda _: None), [[], [0]])
    [path] = spare.glob("*.parquet")
    path.unlink()  # `first` has it open
    path.write_bytes(b"an index of other shards, from before")
    second = ranks.open(1, never, [[], [0]])
    assert (tmp_path / "machine1") in second.files[0].path.parents
    assert_same(second, first)


def test_every_folder_is_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = CountingBucket(tmp_path)
    monkeypatch.setitem(store.STORES, "s3", bucket)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_shards(tmp_path / "data", 30, 3)
    open_index("s3://data", note=lambda _: None)
    before = bucket.requests.total()
    sources = ["s3://data/x-000.tar", "s3://data/x-00{1..2}.tar"]
    assert len(open_index(sources, note=lambda _: None)) == 30
    # Files and folders that have the name with braces, the shards, and the index beside them.
    assert bucket.requests.total() - before == 4
    assert index_file.NAME in {p.name for p in (tmp_path / "data").iterdir()}
