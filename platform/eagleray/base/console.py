"""What a person sees of a run: its log and one progress line, read from the run's folder wherever the run itself is."""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from eagleray.base.files import read_lines

T = TypeVar("T")
QUIET_LINES = 10  # progress lines of a run whose output is no terminal
LONG = 600.0  # seconds without one after which it gets another
out = Console(highlight=False, soft_wrap=True)


@contextmanager
def silence(quiet: bool) -> Iterator[None]:
    """Nothing for a person meanwhile, where a program reads the result."""
    out.quiet = quiet
    try:
        yield
    finally:
        out.quiet = False


@contextmanager
def stop_on_signal(ask: Callable[[], object], said: str) -> Iterator[None]:
    """The first SIGTERM or Ctrl-C asks for an end in order, and it is said; a second Ctrl-C ends at once."""
    asked = False

    def stop(number: int, frame: Any) -> None:
        nonlocal asked
        if not asked:
            ask()
        asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        out.print(f"{said}; once more ends at once")

    before = {s: signal.signal(s, stop) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


def progress_bar(unit: str) -> Progress:
    """A progress bar with rate and time left."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn(f"{{task.completed}}/{{task.total}} {unit}"),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=out,
        disable=not out.is_terminal,
    )


def progress_over(unit: str, what: str, things: Iterable[T], total: int) -> Iterator[T]:
    """The things, with a progress bar that counts them."""
    with progress_bar(unit) as progress:
        task = progress.add_task(what, total=total, rate="")
        for thing in things:
            yield thing
            progress.advance(task)


class FollowRun:
    """Shows a run from a thread until it ends."""

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
        """A line of train.log without its time and rank; details and tracebacks stay in the file."""
        parts = line.split(" ", 4)
        if len(parts) == 5 and parts[3] in ("INFO", "WARNING", "ERROR"):
            out.print(("" if parts[3] == "INFO" else f"{parts[3].lower()}: ") + parts[4], markup=False)

    def _progress(self, r: dict[str, Any]) -> None:
        text = f"loss {r['loss']:.3f}  {r['images_per_s']:.0f} images/s  data wait {100 * r['data_wait']:.0f} %"
        text += f"  bad {r['bad_samples']}" + (f"  kNN {r['knn/top1']:.1f} %" if "knn/top1" in r else "")
        text += f"  top-1 {r['classifier/top1']:.1f} %" if "classifier/top1" in r else ""
        self.bar.update(self.task, completed=r["step"], rate=text)
        if not out.is_terminal and (r["step"] >= self.shown or time.monotonic() - self.told > LONG):
            done = r["step"] / self.steps
            left = (self.steps - r["step"]) * (time.monotonic() - self.began) / max(r["step"] - self.start, 1)
            out.print(f"step {r['step']}/{self.steps} ({done:.0%})  {text}  ETA {left:.0f} s", markup=False)
            self.shown, self.told = r["step"] + max(self.steps // QUIET_LINES, 1), time.monotonic()


class Tail:
    """New whole lines of a file, from where it ended when this began."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.at = path.stat().st_size if path.exists() else 0
        self.file: IO[str] | None = None

    def lines(self) -> list[str]:
        if self.file is None and self.path.exists():
            self.file = self.path.open(errors="replace")
            self.file.seek(self.at)
        found: list[str] = []
        while self.file and (line := self.file.readline()):
            if not line.endswith("\n"):
                self.file.seek(self.file.tell() - len(line.encode()))
                break
            found.append(line.rstrip("\n"))
        return found


def print_error(message: str) -> None:
    """The one line for the person who must act."""
    sys.stdout.flush()
    print(f"error: {message}", file=sys.stderr)
