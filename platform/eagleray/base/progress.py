"""Show the progress of long work: bars or lines, and the time left."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from eagleray.base.console import out, shows_live

T = TypeVar("T")
PHASE_LINES = 10  # largest number of lines printed per phase where no bar can be shown
SHORT = 2.0  # seconds at the beginning of a phase in which no line is printed


def seconds_left(done: int, total: int, *, start: int, seconds: float) -> float:
    """Estimate the seconds until `done` reaches `total`. It took `seconds` to count from `start` to `done`."""
    return (total - done) * seconds / max(done - start, 1)


def progress_bar(unit: str, *, left: bool = True) -> Progress:
    """Return a progress bar with a rate in `unit` per second. With `left`, it also shows the time left."""
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
    """Yield the `things`, of which there are `total`, and show how many are done. `what` names the work."""
    with counting(what, unit) as tick:
        tick(0, total)
        for done, thing in enumerate(things, 1):
            yield thing
            tick(done, total)


@contextmanager
def counting(what: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """A context whose value is a function of two numbers, the units done and the units in all. Each call shows them: on
    a terminal as a bar with rate and time left, elsewhere as a line now and then."""
    with PhaseProgress(unit) as shown:
        yield partial(shown, what)


class PhaseProgress:
    """Shows how many images or other units each phase has handled: on a terminal as a bar, elsewhere as a line now and
    then."""

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

        The first call of a phase starts its clock. Units that were done by then do not count for the rate."""
        now = time.monotonic()
        if phase != self.phase:
            self.phase, self.task = phase, self.bar.add_task(phase, total=total, completed=done, rate="")
            self.began, self.first, self.shown = now, done, done
            return
        rate = (done - self.first) / max(now - self.began, 1e-3)
        self.bar.update(self.task, completed=done, rate=f"{rate:,.0f} {self.unit}/s")
        if not shows_live(out) and now - self.began > SHORT and (done - self.shown) * PHASE_LINES >= total:
            left = seconds_left(done, total, start=self.first, seconds=now - self.began)
            out.print(f"{phase} {done:,}/{total:,} ({done / total:.0%})  {rate:,.0f} {self.unit}/s  ETA {left:.0f} s")
            self.shown = done
