"""Progress of long work: bars, and the time left."""

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from eagleray.base.console import out, shows_live

T = TypeVar("T")
PHASE_LINES = 10  # lines per phase


def seconds_left(done: int, total: int, *, start: int, seconds: float) -> float:
    """Estimate the seconds until `done` reaches `total`, if the count rose from `start` to `done` within `seconds`."""
    return (total - done) * seconds / max(done - start, 1)


def progress_bar(unit: str, *, left: bool = True) -> Progress:
    """Return a progress bar with a rate and, if it is to say what is `left`, the time left."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn(f"{{task.completed}}/{{task.total}} {unit}"),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        *([TimeRemainingColumn()] * left),
        console=out,
        disable=not shows_live(out),
    )


def progress_over(unit: str, what: str, things: Iterable[T], total: int) -> Iterator[T]:
    """Yield the things and count them with a progress bar."""
    with progress_bar(unit) as progress:
        task = progress.add_task(what, total=total, rate="")
        for thing in things:
            yield thing
            progress.advance(task)


class PhaseProgress:
    """Shows how many images, or other units, each phase of a job has handled: a bar in a terminal, an occasional line
    elsewhere."""

    def __init__(self, unit: str = "images") -> None:
        self.unit, self.bar = unit, progress_bar(unit)
        self.phase, self.task = "", TaskID(0)
        self.began, self.first, self.shown = 0.0, 0, 0

    def __enter__(self) -> "PhaseProgress":
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def __call__(self, phase: str, done: int, total: int) -> None:
        """Show that a phase has handled `done` of `total` units.

        The first call of a phase starts its clock, so what was handled before it does not count for the rate.
        """
        now = time.monotonic()
        if phase != self.phase:
            self.phase, self.task = phase, self.bar.add_task(phase, total=total, completed=done, rate="")
            self.began, self.first, self.shown = now, done, done
            return
        rate = (done - self.first) / max(now - self.began, 1e-3)
        self.bar.update(self.task, completed=done, rate=f"{rate:,.0f} {self.unit}/s")
        if not shows_live(out) and (done - self.shown) * PHASE_LINES >= total:
            left = seconds_left(done, total, start=self.first, seconds=now - self.began)
            out.print(f"{phase} {done:,}/{total:,} ({done / total:.0%})  {rate:,.0f} {self.unit}/s  ETA {left:.0f} s")
            self.shown = done
