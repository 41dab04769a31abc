"""What a run lost, told from when it was started and when it ended in order."""

import time
from pathlib import Path

import pytest

from eagleray.runs.attempts import Attempts


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    return now


def test_a_crash_costs_what_was_done_since_the_checkpoint_and_the_time_until_the_restart(
    tmp_path: Path, clock: list[float]
):
    starts = Attempts(tmp_path / "starts.jsonl")
    starts.add(step=0, ranks=2, reached=0)
    clock[0] += 100  # killed at step 90, the last checkpoint at 60
    starts = Attempts(tmp_path / "starts.jsonl")
    starts.add(step=60, ranks=2, reached=90)
    clock[0] += 60
    told = starts.tally(useful=120.0)
    assert told == {"restarts": 1, "steps_repeated": 30, "seconds_lost": 40.0, "goodput": 0.75}


def test_time_between_an_end_in_order_and_the_next_start_is_nobodys(tmp_path: Path, clock: list[float]):
    starts = Attempts(tmp_path / "starts.jsonl")
    starts.add(step=0, ranks=1, reached=0)
    clock[0] += 50
    starts.add(ended=True)
    clock[0] += 10_000
    starts = Attempts(tmp_path / "starts.jsonl")
    starts.add(step=40, ranks=1, reached=40)
    clock[0] += 50
    assert starts.tally(useful=100.0) == {"restarts": 1, "steps_repeated": 0, "seconds_lost": 0.0, "goodput": 1.0}


def test_goodput_ends_with_the_last_step_however_long_the_evaluation_takes(tmp_path: Path, clock: list[float]):
    starts = Attempts(tmp_path / "starts.jsonl")
    starts.add(step=0, ranks=1, reached=0)
    clock[0] += 100
    starts.trained(60)
    at_the_last_step = starts.tally(useful=90.0)
    assert at_the_last_step == {"restarts": 0, "steps_repeated": 0, "seconds_lost": 10.0, "goodput": 0.9}
    clock[0] += 500  # the evaluation
    starts.trained(60)  # known
    assert starts.tally(useful=90.0) == at_the_last_step
    starts = Attempts(tmp_path / "starts.jsonl")  # the process died in it
    starts.add(step=60, ranks=1, reached=60)
    clock[0] += 20
    starts.trained(60)
    assert starts.tally(useful=90.0) == {"restarts": 1, "steps_repeated": 0, "seconds_lost": 30.0, "goodput": 0.75}


def test_starts_in_vain_are_those_since_the_last_progress_and_since_the_command(tmp_path: Path, clock: list[float]):
    starts = Attempts(tmp_path / "starts.jsonl")
    for step in (0, 10, 10, 10):
        starts.add(step=step, ranks=1, reached=step, command="first" if step == 0 else "a")
        clock[0] -= 30  # the clock of another machine, which is behind
    assert starts.in_vain("a") == 3
    assert starts.in_vain("first") == 1
    starts.add(step=20, ranks=1, reached=20, command="a")
    assert starts.in_vain("a") == 1
    for ranks in (2, 3, 4, 4):
        starts.add(step=20, ranks=ranks, reached=20, command="a")
    assert starts.in_vain("a") == 2, "a start after nodes came is no failure"
    assert starts.in_vain("b") == 0
    path = tmp_path / "starts.jsonl"
    path.write_text(
        path.read_text()
        + '7\n{"step": 1}\n{"step": "x", "time": 0}\n{"time": "now", "step": 3}\n'
        + '{"time": 1e300, "step": 3}\n{"time": -1}\n{"time": NaN}\n{"time": 5, "step": 1, "reached": "far"}\n'
    )
    again = Attempts(path)
    assert again.in_vain("a") == 2
    assert again.tally(useful=1.0)["restarts"] == 8
