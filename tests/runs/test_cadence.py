"""What is due after which step."""

from types import SimpleNamespace

import pytest

from eagleray.runs import cadence
from eagleray.runs.cadence import Cadence


def cadence_of(start: int = 0, *, every: int = 0, steps: int | None = None) -> Cadence:
    checkpoint = SimpleNamespace(steps=steps, minutes=10)
    recipe = SimpleNamespace(log_steps=4, evaluate=SimpleNamespace(every=every), checkpoint=checkpoint)
    plan = SimpleNamespace(recipe=recipe, steps=20, stream=SimpleNamespace(steps_per_epoch=5))
    return Cadence(plan, start)  # type: ignore[arg-type]


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


def test_minutes_are_counted_from_the_last_checkpoint(monkeypatch: pytest.MonkeyPatch):
    now = 0.0
    monkeypatch.setattr(cadence.time, "monotonic", lambda: now)
    c = cadence_of()
    assert not c.saves(1)
    now = 601.0
    assert c.saves(2)
    c.saved(2)
    assert not c.saves(3)
