"""Measure goodput, the share of a run's time that went into steps that were not lost, from starts.jsonl."""

import time
from pathlib import Path
from typing import Any

from eagleray.base.files import JsonLines, read_lines


class Attempts:
    """The lines of starts.jsonl: one for every start of a run and every orderly end. Times are seconds since 1970."""

    def __init__(self, path: Path) -> None:
        lines = [line for line in read_lines(path) if isinstance(line.get("time"), int | float)]
        self.lines, self.file = lines, JsonLines(path)

    def add(self, **line: Any) -> None:
        """Append a line, later if the disk is full."""
        self.lines.append(line | {"time": round(time.time(), 2)})
        self.file.log(self.lines[-1])

    @property
    def starts(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if type(line.get("step")) is int]

    def in_vain(self, command: str) -> int:
        """Return how many of the last starts of a command began at the same step with the same number of ranks, without
        progress in between: with another number it is the cluster that changed."""
        starts = [(s["step"], s.get("ranks")) for s in self.starts if s.get("command") == command]
        return next((i for i, start in enumerate(reversed(starts)) if start != starts[-1]), len(starts))

    def tally(self, useful: float) -> dict[str, float]:
        """Return the number of restarts, the steps that were repeated, the seconds lost, and goodput. Goodput is the
        `useful` seconds of steps divided by all seconds since the first start; the time between an orderly end and
        the next start is not counted."""
        waited = sum(
            after["time"] - line["time"]
            for line, after in zip(self.lines, self.lines[1:], strict=False)
            if "step" not in line
        )
        wall = time.time() - self.lines[0]["time"] - waited
        return {
            "restarts": len(self.starts) - 1,
            "steps_repeated": sum(max(s.get("reached", 0) - s["step"], 0) for s in self.starts),
            "seconds_lost": round(wall - useful, 1),
            "goodput": round(useful / wall, 4) if wall > 0 else 1.0,
        }
