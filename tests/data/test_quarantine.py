"""Bad samples are listed once, counted over restarts, and too many of them end the run."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from eagleray.base.errors import UserError
from eagleray.data.quarantine import BadSample, Quarantine


def bad(i: int, reason: str = "truncated") -> BadSample:
    return BadSample(f"s3://bucket/x-{i % 3}.tar", f"key ä\u2028{i}", 100 * i, reason)


def listed(path: Path) -> list[BadSample]:
    return [BadSample(**json.loads(line)) for line in path.read_text().split("\n")[:-1]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "quarantine.jsonl"


def test_each_sample_is_listed_once_over_epochs_and_restarts(path: Path) -> None:
    for restart in range(3):
        quarantine = Quarantine(path, samples=1000, limit=1)
        for _epoch in range(2):
            quarantine.add([bad(i) for i in (1, 2, 1)])
            quarantine.add(bad(i, f"worded otherwise {restart}") for i in range(2, 5))
        assert len(quarantine) == 4
    assert [b.key for b in listed(path)] == [bad(i).key for i in range(1, 5)]
    assert listed(path)[:2] == [bad(1), bad(2)]


def test_samples_of_one_key_are_told_apart_by_their_place(path: Path) -> None:
    quarantine = Quarantine(path, samples=10, limit=1)
    places = [
        BadSample("a.tar", "k", 1, ""),
        BadSample("a.tar", "k", 2, ""),
        BadSample("b.tar", "k", 1, ""),
        BadSample("b.tar", "", -1, ""),
    ]
    quarantine.add(places)
    assert listed(path) == places


@pytest.mark.parametrize(("samples", "limit", "most"), [(100, 0.1, 10), (100, 0.0, 0), (7, 0.5, 3), (1000, 0.01, 10)])
def test_more_than_the_limit_ends_the_run_and_they_are_listed(
    path: Path, samples: int, limit: float, most: int
) -> None:
    quarantine = Quarantine(path, samples=samples, limit=limit)
    quarantine.add(bad(i) for i in range(most))
    with pytest.raises(UserError) as caught:
        quarantine.add([bad(most)])
    assert str(caught.value) == (
        f"{most + 1} of {samples} samples are broken, more than data.bad_limit={limit:g} allows; {path} lists them"
    )
    assert len(listed(path)) == most + 1
    with pytest.raises(UserError, match="are broken"):
        Quarantine(path, samples=samples, limit=limit).add([])


def test_a_rank_that_does_not_write_counts(path: Path) -> None:
    quarantine = Quarantine(path, samples=10, limit=0.2)
    quarantine.add([bad(1), bad(2)], write=False)
    assert not path.exists()
    assert len(quarantine) == 2
    with pytest.raises(UserError, match="3 of 10 samples"):
        quarantine.add([bad(3)], write=False)


def test_nothing_bad_leaves_no_file(path: Path) -> None:
    Quarantine(path, samples=10, limit=0).add([])
    assert not path.exists()


def test_a_line_that_a_killed_run_left_half_written_does_not_stop_the_next(path: Path) -> None:
    Quarantine(path, samples=10, limit=1).add([bad(1), bad(2)])
    path.write_text(path.read_text()[:-20])
    for _ in range(2):
        quarantine = Quarantine(path, samples=10, limit=1)
        quarantine.add([bad(2), bad(3)])
        assert len(quarantine) == 3
    lines = path.read_text().split("\n")
    assert [json.dumps(asdict(bad(i)), ensure_ascii=False) in lines for i in (1, 2, 3)] == [True] * 3
