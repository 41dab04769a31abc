"""Many listings at once give each name once, wherever the names are divided, and go on where they were stopped."""

import itertools
from collections.abc import Sequence
from random import Random

import pytest
from helpers.named_store import NamedStore
from hypothesis import given
from hypothesis import strategies as st

from eagleray.base.errors import UserError
from eagleray.storage import store, wide_walk
from eagleray.storage.blob import Blob
from eagleray.storage.wide_walk import WHOLE, Disordered, Names, middle


def walked(left: Sequence[Names], most: int | None = None) -> tuple[list[str], Sequence[Names]]:
    """The names of a walk, or of its first batches, and the spans that it has left then."""
    found: list[str] = []
    for blobs, rest in itertools.islice(wide_walk.wide_walk("s3://b/", left), most):
        found += [blob.url.removeprefix("s3://b/") for blob in blobs]
        left = rest
    return found, left


def most_pages(names: Sequence[str], begun: int = 1) -> int:
    """The requests that a walk makes at most, whichever thread runs when. Each full page allows for one span more, and
    a span has at most one page that is not full and one that is empty."""
    full = len(names) // wide_walk.BATCH
    return full + 2 * (begun + wide_walk.TRIES + full)


def kinds_of_names(count: int) -> dict[str, list[str]]:
    rng = Random(7)
    letters = [chr(c) for c in (*range(0x20, 0x7F), 0xE9, 0x3B1, 0x4E2D, 0x1F600)]
    return {
        "numbers": [f"photos/IMG_{n:06d}.jpg" for n in range(count)],
        "drawn": sorted({"".join(rng.choices(letters, k=rng.randint(1, 12))) for _ in range(count)}),
        "uneven": [f"a/{n:05d}" for n in range(count - 3)] + ["b/1", "zz/1", "é/1"],
        "few": ["a", "b", "c"],
        "none": [],
    }


@pytest.mark.parametrize("kind", kinds_of_names(0))
def test_each_name_is_listed_once_by_many(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = kinds_of_names(40_000)[kind]
    there = NamedStore(names, width=4)
    monkeypatch.setitem(store.STORES, "s3", there)
    found, left = walked([WHOLE])
    assert sorted(found) == names
    assert left == []
    assert there.pages <= most_pages(names)
    assert len(names) < 1000 or found != names, "several have listed"


def test_a_walk_that_was_stopped_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    names = kinds_of_names(40_000)["numbers"]
    for most in (1, 5, 17, 30):
        monkeypatch.setitem(store.STORES, "s3", there := NamedStore(names, width=4))
        found, left = walked([WHOLE], most)
        assert 0 < len(found) < len(names)
        monkeypatch.setitem(store.STORES, "s3", there := NamedStore(names, width=4))
        begun = len(left)
        rest, left = walked(left)
        assert sorted(found + rest) == names
        assert left == []
        assert there.pages <= most_pages(rest, begun)


def test_a_store_that_only_begins_at_the_beginning_is_walked_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["b", "a", *map(str, range(3000))]
    monkeypatch.setitem(store.STORES, "s3", there := NamedStore(names))
    there.seeks = False
    assert walked([WHOLE]) == (names, [])
    assert walked([WHOLE], 2)[1] == [WHOLE]


def test_what_fails_or_lies_ends_the_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(store.STORES, "s3", there := NamedStore(["b", "a"]))
    with pytest.raises(Disordered):
        walked([WHOLE])

    def refuse(url: str, after: str = "") -> list[Blob]:
        raise UserError(f"{url}: AccessDenied")

    monkeypatch.setattr(there, "walk", refuse)
    with pytest.raises(UserError, match="s3://b/: AccessDenied"):
        walked([WHOLE])


@given(st.text(max_size=6), st.text(max_size=6))
def test_a_middle_lies_between(low: str, high: str) -> None:
    between = middle(low, high)
    assert not between or (low < between and (between < high or not high))
    assert middle(low, "") or any(c > "~" for c in low)
    assert set(between.removeprefix(low[: len(between) - 1])) <= set(map(chr, range(0x1F, 0x7F)))
