"""The checks find what they are there to find."""

import itertools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from chaos.check import Line, Step, steps, verify, with_stand_ins
from chaos.job import TRACING

WANTED = {
    1: Step(0, ["a:0", "a:1", "b:0", "b:1"], [0, 1, 2, 3]),
    2: Step(0, ["a:2", "c:0", "b:2", "b:3"], [4, 5, 6, 7]),
    3: Step(1, ["b:0", "b:2", "c:0", "a:2"], [2, 6, 5, 4]),
}


def given(attempt: str, step: int, *rows: int) -> list[Line]:
    """A step's lines, one of each rank."""
    s = WANTED[step]
    ends = [sum(rows[:i]) for i in range(len(rows) + 1)]
    parts = [slice(a, b) for a, b in itertools.pairwise(ends)]
    return [Line(attempt, step, s.epoch, i, list(rows), s.samples[p], s.labels[p]) for i, p in enumerate(parts)]


def test_a_run_that_was_killed_and_went_on_with_other_ranks() -> None:
    lines = given("x", 1, 4) + given("x", 2, 4) + given("y", 2, 1, 3) + given("z", 3, 2, 2)[:1] + given("w", 3, 4)
    verify(lines, WANTED, 3)
    assert steps(lines) == WANTED


def test_a_step_that_not_all_ranks_took_is_missing() -> None:
    lines = given("x", 1, 4) + given("y", 2, 1, 3)[1:] + given("z", 2, 1, 3)[:1] + given("z", 3, 1, 3)
    with pytest.raises(AssertionError):
        verify(lines, WANTED, 3)


@pytest.mark.parametrize("change", [{"samples": ["a:2", "c:0", "b:3", "b:2"]}, {"labels": [4, 5, 6, 8]}])
def test_a_repeated_step_that_differs_is_found(change: dict[str, list[str]]) -> None:
    [other] = given("y", 2, 4)
    lines = [*given("x", 1, 4), replace(other, **change), *given("z", 2, 4)]
    with pytest.raises(AssertionError, match="step 2, rank 0 of 1, attempt y: other"):
        verify(lines, WANTED, 2)


def test_the_next_good_sample_of_the_block_stands_in() -> None:
    found = with_stand_ins(WANTED, {"a:1", "b:3", "b:2"}, lanes=2)
    assert found[1] == Step(0, ["a:0", "a:2", "b:0", "b:1"], [0, 4, 2, 3])
    assert found[2] == Step(0, ["a:2", "c:0", "b:0", "b:0"], [4, 5, 2, 2])
    assert found[3].samples[:2] == ["b:0", "b:0"]


def test_the_trace_leaves_a_site_of_its_own_alone(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('the site')")
    path = os.pathsep.join([str(TRACING), str(tmp_path)])
    command = [sys.executable, "-c", "import json; print('and the program')"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.stdout.split("\n")[:2] == ["the site", "and the program"]
    assert not done.stderr
