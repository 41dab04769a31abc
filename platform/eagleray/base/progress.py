"""Progress of a work of several phases: a bar of each or, where the output is no terminal, a line now and then."""

import time

from rich.progress import Progress, TaskID

from eagleray.base.console import out, progress_bar

STEPS = 10  # lines per phase


class PhaseProgress:
    """Counts images."""

    def __init__(self) -> None:
        self.bar: Progress = progress_bar("images")
        self.phase, self.task = "", TaskID(0)
        self.began, self.first, self.shown = 0.0, 0, 0

    def __enter__(self) -> "PhaseProgress":
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def __call__(self, phase: str, done: int, total: int) -> None:
        """What is being done, and how many images it has been done with so far; of those, some at an earlier time."""
        now = time.monotonic()
        if phase != self.phase:
            self.phase, self.task = phase, self.bar.add_task(phase, total=total, completed=done, rate="")
            self.began, self.first, self.shown = now, done, done
            return
        rate = (done - self.first) / max(now - self.began, 1e-3)
        self.bar.update(self.task, completed=done, rate=f"{rate:,.0f} images/s")
        if not out.is_terminal and (done - self.shown) * STEPS >= total:
            left = (total - done) / rate
            out.print(f"{phase} {done:,}/{total:,} ({done / total:.0%})  {rate:,.0f} images/s  ETA {left:.0f} s")
            self.shown = done
