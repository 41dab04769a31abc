"""What is due after which step."""

from types import SimpleNamespace
from typing import Any

import pytest

from eagleray.runs import agreement
from eagleray.runs.agreement import Cadence
from eagleray.runs.plan import Plan


def plan_of(every: int = 0, **checkpoint: Any) -> Any:
    checkpoint = {"steps": None, "minutes": 10, "milestones": ()} | checkpoint
    sections = {"evaluate": SimpleNamespace(every=every), "checkpoint": SimpleNamespace(**checkpoint)}
    recipe = SimpleNamespace(log_steps=4, **sections)
    stream = SimpleNamespace(steps_per_epoch=5)
    return Plan(recipe, stream, None, 20)  # type: ignore[arg-type]


def cadence_of(start: int = 0, *, every: int = 0, steps: int | None = None) -> Cadence:
    return Cadence(plan_of(every, steps=steps), start)


def test_records_are_written_at_evaluations_and_at_the_last_step_too():
    c = cadence_of(every=2)
    assert [s for s in range(1, 21) if c.evaluates(s)] == [10]
    assert [s for s in range(1, 21) if c.records(s)] == [4, 8, 10, 12, 16, 20]
    assert not any(cadence_of().evaluates(s) for s in range(1, 21))


def test_steps_are_counted_from_the_last_checkpoint():
    c = cadence_of(3, steps=5)
    assert [s for s in range(4, 10) if c.saves(s)] == [8, 9]
    c.saved(9)
    assert not c.saves(13)
    assert c.saves(14)


def test_milestones_are_the_ends_of_epochs():
    def found(milestones: Any) -> list[int]:
        plan = plan_of(milestones=milestones)
        return [s for s in range(1, 21) if Cadence(plan, 0).is_milestone(s)]

    assert (found(()), found((1, 3)), found(2)) == ([], [5, 15], [10, 20])


def test_minutes_are_counted_from_the_last_checkpoint(monkeypatch: pytest.MonkeyPatch):
    now = 0.0
    monkeypatch.setattr(agreement.time, "monotonic", lambda: now)
    c = cadence_of()
    assert not c.saves(1)
    now = 601.0
    assert c.saves(2)
    c.saved(2)
    assert not c.saves(3)
