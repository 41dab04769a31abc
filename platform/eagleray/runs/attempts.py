"""Measure goodput, the share of a run's time that went into steps that were not lost, from starts.jsonl."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagleray.base.files import JsonLines, read_lines

WHOLE = ("step", "reached", "ranks")  # fields of a line that must be integers
NEVER = 10**11  # upper limit of a line's time in seconds since 1970, in the year 5138


def read_starts(path: Path) -> list[dict[str, Any]]:
    """Return the lines of starts.jsonl. Lines without a valid time, or with a count that is not an integer, are left
    out, as a run's folder may come from a stranger."""
    return [line for line in read_lines(path) if _is_valid(line)]


def _is_valid(line: Mapping[str, Any]) -> bool:
    time = line.get("time")
    timed = isinstance(time, int | float) and 0 <= time < NEVER
    return timed and all(type(line.get(name, 0)) is int for name in WHOLE)


class Attempts:
    """The lines of starts.jsonl: one for each start of a run, one when its last step is taken, and one for each end
    that is not a crash. Times are in seconds since 1970."""

    def __init__(self, path: Path) -> None:
        self.lines, self.file = read_starts(path), JsonLines(path)

    def add(self, **line: Any) -> None:
        """Append a line with the current time. If the disk is full, the line is written later."""
        self.lines.append(line | {"time": round(time.time(), 2)})
        self.file.log(self.lines[-1])

    def trained(self, step: int) -> None:
        """Record that the run has taken its last step, unless this is recorded. Later time does not lower goodput."""
        if "step" in self.lines[-1]:
            self.add(trained=step)

    @property
    def starts(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if "step" in line]

    def in_vain(self, command: str) -> int:
        """Return how many of the latest starts of a command began at the same step with the same number of ranks. A
        different step would mean progress, and a different number of ranks a changed cluster."""
        starts = [(s["step"], s.get("ranks")) for s in self.starts if s.get("command") == command]
        return next((i for i, start in enumerate(reversed(starts)) if start != starts[-1]), len(starts))

    def tally(self, useful: float) -> dict[str, float]:
        """Return the number of restarts, the steps that were repeated, the seconds lost, and goodput: the `useful`
        seconds of steps divided by all seconds since the first start. The time from the last step of the run, or from
        an end that is not a crash, to the next start is left out, and so is the evaluation at the end."""
        waited = sum(
            after["time"] - line["time"]
            for line, after in zip(self.lines, self.lines[1:], strict=False)
            if "step" not in line
        )
        end = time.time() if "step" in self.lines[-1] else self.lines[-1]["time"]
        wall = end - self.lines[0]["time"] - waited
        return {
            "restarts": len(self.starts) - 1,
            "steps_repeated": sum(max(s.get("reached", 0) - s["step"], 0) for s in self.starts),
            "seconds_lost": round(wall - useful, 1),
            "goodput": round(useful / wall, 4) if wall > 0 else 1.0,
        }
