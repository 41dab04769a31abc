"""Progress of long work: bars, the time left, and the progress of a run read from its folder."""

import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeVar

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from eagleray.base.console import out, shows_live
from eagleray.base.files import read_lines

T = TypeVar("T")
RUN_LINES = 10  # progress lines of a run whose output is not a terminal
LONG = 600.0  # seconds without a progress line after which a run prints another
PHASE_LINES = 10  # lines per phase


def seconds_left(done: int, total: int, *, start: int, seconds: float) -> float:
    """Estimate the seconds that remain, at the pace at which `start` became `done` within `seconds`."""
    return (total - done) * seconds / max(done - start, 1)


def progress_bar(unit: str) -> Progress:
    """Return a progress bar with a rate and the time left."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn(f"{{task.completed}}/{{task.total}} {unit}"),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
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
    """Shows how many images each phase of a job has done: a bar in a terminal, a line now and then elsewhere."""

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
        """Show that `done` of `total` images are through a phase; those of its first call are not timed."""
        now = time.monotonic()
        if phase != self.phase:
            self.phase, self.task = phase, self.bar.add_task(phase, total=total, completed=done, rate="")
            self.began, self.first, self.shown = now, done, done
            return
        rate = (done - self.first) / max(now - self.began, 1e-3)
        self.bar.update(self.task, completed=done, rate=f"{rate:,.0f} images/s")
        if not shows_live(out) and (done - self.shown) * PHASE_LINES >= total:
            left = seconds_left(done, total, start=self.first, seconds=now - self.began)
            out.print(f"{phase} {done:,}/{total:,} ({done / total:.0%})  {rate:,.0f} images/s  ETA {left:.0f} s")
            self.shown = done


class FollowRun:
    """Shows the log and the progress of a run, read from its folder by a thread, until the run ends."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps = folder, steps
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._work, name="follow", daemon=True)
        self.log = Tail(folder / "train.log")
        self.metrics, self.shown, self.began = folder / "metrics.jsonl", 0, time.monotonic()
        self.told = self.began
        lines = read_lines(self.metrics)
        self.start = lines[-1]["step"] if lines else 0
        self.seen = 0  # bytes of metrics.jsonl
        self.bar = progress_bar("steps")
        self.task = self.bar.add_task("pretrain", total=steps, rate="")

    def __enter__(self) -> "FollowRun":
        self.bar.start()
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ended.set()
        self.thread.join()
        self.bar.stop()

    def _work(self) -> None:
        last = False
        while not last:
            last = self.ended.wait(0.5)
            for line in self.log.lines():
                self._say(line)
            size = self.metrics.stat().st_size if self.metrics.exists() else 0
            if size != self.seen:
                self.seen = size
                records = read_lines(self.metrics)
                if records:
                    self._progress(records[-1])

    def _say(self, line: str) -> None:
        """Print a line of train.log without its time and rank; details and tracebacks stay in the file."""
        parts = line.split(" ", 4)
        if len(parts) == 5 and parts[3] in ("INFO", "WARNING", "ERROR"):
            out.print(("" if parts[3] == "INFO" else f"{parts[3].lower()}: ") + parts[4], markup=False)

    def _progress(self, r: dict[str, Any]) -> None:
        text = f"loss {r['loss']:.3f}  {r['images_per_s']:.0f} images/s  data wait {100 * r['data_wait']:.0f} %"
        text += f"  bad {r['bad_samples']}" + (f"  kNN {r['knn/top1']:.1f} %" if "knn/top1" in r else "")
        text += f"  top-1 {r['classifier/top1']:.1f} %" if "classifier/top1" in r else ""
        self.bar.update(self.task, completed=r["step"], rate=text)
        if not shows_live(out) and (r["step"] >= self.shown or time.monotonic() - self.told > LONG):
            done = r["step"] / self.steps
            left = seconds_left(r["step"], self.steps, start=self.start, seconds=time.monotonic() - self.began)
            out.print(f"step {r['step']}/{self.steps} ({done:.0%})  {text}  ETA {left:.0f} s", markup=False)
            self.shown, self.told = r["step"] + max(self.steps // RUN_LINES, 1), time.monotonic()


class Tail:
    """Reads the complete lines that are appended to a file after this object was made."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.at = path.stat().st_size if path.exists() else 0
        self.file: IO[str] | None = None

    def lines(self) -> list[str]:
        if self.file is None and self.path.exists():
            self.file = self.path.open(errors="replace")
            self.file.seek(self.at)
        lines: list[str] = []
        while self.file and (line := self.file.readline()):
            if not line.endswith("\n"):
                self.file.seek(self.file.tell() - len(line.encode()))
                break
            lines.append(line.rstrip("\n"))
        return lines
