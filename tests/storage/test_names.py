"""A file or folder that exists under its very name is taken before the name is read as a pattern."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.fuzzing import counts, examples
from hypothesis import strategies as st

from eagleray.base.errors import UserError
from eagleray.storage import store
from eagleray.storage.blob import Blob
from eagleray.storage.store import LocalStore, list_shards
from eagleray.storage.url_patterns import split_literal

LETTERS = "ab12[]{}*?,.-! "
NAME = st.text(LETTERS, min_size=1, max_size=8).filter(lambda name: name.strip(".") != "")
LOCAL = st.text(LETTERS + "é\udce9", min_size=1, max_size=8).filter(lambda name: name.strip(".") != "")


class Keys(LocalStore):
    """A bucket whose files are keys, without folders."""

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.asked = 0

    def list(self, url: str, start: str = "", *, patience: float = 0.0) -> list[Blob]:
        self.asked += 1
        here = [k for k in self.keys if k.startswith(url + start) and "/" not in k.removeprefix(url)]
        if url.endswith("/"):
            return [Blob(k, 1) for k in sorted(here)]
        return [Blob(url, 1)] if url in self.keys else self.list(url + "/")

    def walk(self, url: str) -> Iterator[Blob]:
        self.asked += 1
        yield from (Blob(k, 1) for k in sorted(self.keys) if k.startswith(url.rstrip("/") + "/"))


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Keys:
    bucket = Keys()
    monkeypatch.setitem(store.STORES, "s3", bucket)
    return bucket


def names(url: str) -> list[str]:
    return [b.url.rpartition("/")[2] for b in list_shards(url)]


@pytest.mark.parametrize("count", counts(150))
def test_what_is_there_by_name_is_taken_on_a_disk(tmp_path: Path, count: int | None) -> None:
    def check(drawn: tuple[str, str, str]) -> None:
        above, folder, file = drawn
        place = tmp_path / "at" / above / folder
        place.mkdir(parents=True)
        for name in (f"{file}.tar", "x-0.tar", "x-1.tar", "x1.tar", "notes.txt"):
            (place / name).write_bytes(b"x")
        inside = sorted(
            {*[f"{file}.tar"][: not file.startswith(".")], "x-0.tar", "x-1.tar", "x1.tar"}
        )  # none is hidden
        assert sorted(names(str(place))) == sorted(names(f"{place}/")) == inside
        assert names(f"{place}/{file}.tar") == [f"{file}.tar"]
        assert names(f"{place}/x-{{0..1}}.tar") == ["x-0.tar", "x-1.tar"]
        assert {"x-0.tar", "x-1.tar"} <= set(names(f"{place}/x-?.tar"))
        assert sorted(names(f"{place}/*.tar")) == ["*.tar"] if file == "*" else inside
        shutil.rmtree(tmp_path / "at")

    examples(st.tuples(LOCAL, LOCAL, LOCAL), check, count, many=5000)


@pytest.mark.parametrize("count", counts(150))
def test_what_is_there_by_name_is_taken_in_a_store(bucket: Keys, count: int | None) -> None:
    def check(drawn: tuple[str, str, str]) -> None:
        above, folder, file = drawn
        place = f"s3://b/{above}/{folder}"
        inside = sorted({*[f"{file}.tar"][: not file.startswith(".")], "x-0.tar", "x-1.tar"})  # none is hidden
        bucket.keys = {f"{place}/{name}" for name in (*inside, f"{file}.tar", "notes.txt")} | {"s3://b/other/x-0.tar"}
        assert names(place) == names(f"{place}/") == inside
        assert names(f"{place}/{file}.tar") == [f"{file}.tar"]
        assert names(f"{place}/x-{{0..1}}.tar") == ["x-0.tar", "x-1.tar"]

    examples(st.tuples(NAME, NAME, NAME), check, count, many=5000)


@pytest.mark.parametrize("folder", ["x.tar", "x [1].tar", "{a,b}.tar", "what?.tar"])
def test_a_folder_may_be_called_like_a_shard(bucket: Keys, tmp_path: Path, folder: str) -> None:
    bucket.keys = {f"s3://b/{folder}/{name}.tar" for name in "ab"}
    (tmp_path / folder).mkdir()
    for name in "ab":
        (tmp_path / folder / f"{name}.tar").touch()
    for place in (f"s3://b/{folder}", f"{tmp_path}/{folder}"):
        assert names(place) == names(f"{place}/") == ["a.tar", "b.tar"]


def test_a_name_without_letters_of_patterns_costs_no_request(bucket: Keys) -> None:
    bucket.keys = {"s3://b/train/x.tar"}
    assert names("s3://b/train") == names("s3://b/train/x.tar") == ["x.tar"]
    assert bucket.asked == 2


def test_names_are_tried_from_the_left_and_only_where_they_have_such_letters() -> None:
    tried: list[tuple[str, bool]] = []

    def exists(name: str, part: bool) -> bool:
        tried.append((name, part))
        return name.endswith("[1]")

    assert split_literal("s3://b/a [1]/c/d{1,2}/e*.tar", exists) == ("s3://b/a [1]/c/", "d{1,2}/e*.tar")
    assert tried == [("s3://b/a [1]", True), ("s3://b/a [1]/c/d{1,2}", True)]
    assert split_literal("/plain/x.tar", exists) == ("/plain/x.tar", "")
    assert split_literal("/a [1]/", exists) == ("/a [1]/", "")
    assert tried[2:] == [("/a [1]", False)]


def test_a_pattern_that_is_no_name_is_still_one(bucket: Keys, tmp_path: Path) -> None:
    bucket.keys = {f"s3://b/{folder}/x-{n}.tar" for folder in ("a", "b") for n in range(3)}
    assert names("s3://b/{a,b}/x-[01].tar") == ["x-0.tar", "x-1.tar"] * 2
    with pytest.raises(UserError, match="wildcards are allowed in the file name only"):
        list_shards("s3://b/[ab]/x-0.tar")
    with pytest.raises(UserError, match="no \\.tar shards there"):
        list_shards(f"{tmp_path}/what?")
