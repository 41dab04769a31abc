"""Find what a run has recorded of one of its steps: loss and gradient norm, and the start that took the step."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eagleray.base.errors import UserError
from eagleray.base.files import is_number, read_history, read_lines
from eagleray.runs import layout
from eagleray.runs.step_log import REPEATED

Line = Mapping[str, Any]


class StepRecord(NamedTuple):
    """The record of one step."""

    step: int
    values: dict[str, float]  # by the names in REPEATED
    starts: Sequence[Line]  # of the run, as in starts.jsonl
    skipped: list[str] | None  # keys of the step's images, where its gradient was not finite

    @property
    def start(self) -> Line:
        """The start that took the step."""
        return start_of(self.starts, self.step)


def find_record(folder: Path, step: int) -> StepRecord:
    """Return what the run with its files in a folder has recorded of a step. Raises UserError when that is nothing."""
    lines, each = read_history(folder / layout.METRICS), read_history(folder / layout.STEPS)
    reached = max((r["step"] for r in (*lines[-1:], *each[-1:])), default=0)
    if not 0 < step <= reached:
        raise UserError(f"step {step}: expected a step from 1 to {reached}, which the run has recorded")
    starts = [s for s in read_lines(folder / layout.STARTS) if type(s.get("step")) is int]
    skips = [s.get("keys") for s in read_history(folder / layout.SKIPPED) if s["step"] == step]
    found = next((r for r in each if r["step"] == step), None)
    if found is None:
        raise UserError(f"step {step}: not recorded, as the run was killed between this step and its next line")
    if missing := [name for name in REPEATED if not is_number(found.get(name))]:
        raise UserError(f"step {step}: {folder} has recorded no number for its {missing[0]}")
    values = {name: float(found[name]) for name in REPEATED}
    return StepRecord(step, values, starts, skips[-1] if skips else None)


def start_of(starts: Sequence[Line], step: int) -> Line:
    """Return the start that took a step: the last one that began below it, as each takes all its steps again."""
    return next((s for s in reversed(starts) if s["step"] < step), {})
