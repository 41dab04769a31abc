"""Follow a run from outside: read its log and its progress from its folder while it trains."""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from eagleray.base.console import out, say, shows_live, stop_on_signal
from eagleray.base.errors import one_line
from eagleray.base.files import Tail, history, parse_lines
from eagleray.base.progress import progress_bar
from eagleray.runs import layout
from eagleray.runs.metrics import (
    BAD_SAMPLES,
    CLASSIFIER_TOP1,
    DATA_WAIT,
    GOODPUT,
    IMAGES_PER_S,
    KNN_TOP1,
    LOSS,
    MONITOR_KNN,
)
from eagleray.runs.run_store import run_store
from eagleray.runs.stop_request import StopRequest

SCORES = {"kNN": KNN_TOP1, "top-1": CLASSIFIER_TOP1, "kNN monitor": MONITOR_KNN}
QUIET = 15.0  # seconds after which a line says that a run is still starting; this doubles after each line
LINES = 10  # number of progress lines of a run whose output is not a terminal
LONG = 600.0  # longest time in seconds between two progress lines
RECENT = 20  # number of newest lines of metrics.jsonl from whose mean speed the remaining time is estimated


class FollowRun:
    """A context in which a thread reads the log and the progress of a run from its folder, and shows them."""

    def __init__(self, folder: Path, steps: int, batch: int) -> None:
        """`steps` is the number of steps of the whole run, each with `batch` images."""
        self.folder, self.steps, self.batch = folder, steps, batch
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._work, name="follow", daemon=True)
        self.log, self.metrics = Tail(folder / layout.LOG), Tail(folder / layout.METRICS, whole=True)
        self.scores: dict[str, float] = {}  # newest scores by key, kept as most lines of metrics.jsonl have none
        self.failure = ""  # newest error of the log, not printed yet: a command that ends with this error prints it
        self.silence = QUIET  # seconds without metrics after which `_say_that_it_starts` prints; doubles each time
        self.next_step, self.printed = 0, time.monotonic()  # step of the next progress line, time of the last
        self.pace: deque[float] = deque(maxlen=RECENT)  # images per second, the newest last
        start = max((r["step"] for r in history(parse_lines(self.metrics.lines()))), default=0)
        self.bar = progress_bar("steps", left=False)
        self.task = self.bar.add_task("pretrain", total=steps, completed=start, rate="")

    def __enter__(self) -> "FollowRun":
        self.bar.start()
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ended.set()
        self.thread.join()
        if not error or one_line(error) not in self.failure:
            self._print_failure(went_on=not error)
        self.bar.stop()

    def _work(self) -> None:
        """Print new lines of the log, and update the progress, until the run ends."""
        last = False
        while not last:
            last = self.ended.wait(0.5)
            self._say_that_it_starts()
            records = history(parse_lines(self.metrics.lines()))
            if records:  # new steps: the run has continued after the error, so the command does not end with it
                self._print_failure(went_on=True)
            for line in self.log.lines():
                self._print(line)
            for record in records:
                self.scores |= {key: record[key] for key in SCORES.values() if key in record}
                self.pace.append(record[IMAGES_PER_S])
            for record in records[-1:]:
                self._show_progress(self.scores | record)

    def _say_that_it_starts(self) -> None:
        """Print how long the run has been starting, until it has metrics. A progress bar makes this unnecessary."""
        passed = time.monotonic() - self.printed
        if passed > self.silence and not (self.pace or shows_live(out) or self.ended.is_set()):
            out.print(f"starting for {passed:.0f} s: processes load PyTorch, then the first batches")
            self.silence *= 2

    def _print(self, line: str) -> None:
        """Print a line of train.log without its time and rank. Debug lines and tracebacks are left out, and an error is
        kept in `failure`."""
        parts = line.split(" ", 4)
        if len(parts) < 5:
            return
        if parts[3] == "ERROR":
            self._print_failure(went_on=True)
            self.failure = f"error: {parts[4]}"
        elif parts[3] in ("INFO", "WARNING"):
            out.print(("" if parts[3] == "INFO" else f"{parts[3].lower()}: ") + parts[4], markup=False)

    def _print_failure(self, went_on: bool) -> None:
        """Print the last error of the log, as a warning if the run went on after it."""
        if self.failure:
            earlier = self.failure.replace("error: the run failed", "warning: an earlier attempt failed", 1)
            out.print(earlier if went_on else self.failure, markup=False)
        self.failure = ""

    def _show_progress(self, record: dict[str, Any]) -> None:
        """Show a line of metrics.jsonl on the progress bar, or print it where there is no terminal."""
        step = record["step"]
        text, left = progress_text(record), f"ETA {self.seconds_left(step):.0f} s"
        self.bar.update(self.task, completed=step, rate=f"{left}  {text}")  # ETA first: narrow terminals cut the end
        due = step >= min(self.next_step, self.steps) or time.monotonic() - self.printed > LONG
        if not shows_live(out) and due:
            out.print(f"step {step}/{self.steps} ({step / self.steps:.0%})  {text}  {left}", markup=False)
            self.next_step, self.printed = step + max(self.steps // LINES, 1), time.monotonic()

    def seconds_left(self, step: int) -> float:
        """Return the seconds that the steps after this one will take at the mean speed of the last RECENT lines.
        The time before the first step, such as of indexing, is not counted, as it says nothing about the steps."""
        each = [self.batch / images for images in self.pace if images > 0]
        return (self.steps - step) * sum(each) / max(len(each), 1)


@contextlib.contextmanager
def following(out: str, steps: int, batch: int, command: str, hours: float | None = None) -> Iterator[StopRequest]:
    """A context that shows the progress of a run with `steps` steps of `batch` images. `command` is the id of its
    command. An interrupt, or the end of `hours` hours if it is given, asks the run to save and stop."""
    run = run_store(out)
    with (
        contextlib.closing(StopRequest(out, command)) as stop,
        FollowRun(run.view, steps, batch),
        run.following(),
        stop_on_signal(stop.ask, "stopping after this step"),
        stop.after(hours, say),
    ):
        yield stop


def progress_text(record: Mapping[str, Any]) -> str:
    """Return the numbers of a line of metrics.jsonl to show beside the progress bar."""
    parts = [
        f"loss {record[LOSS]:.3f}",
        f"{record[IMAGES_PER_S]:.0f} images/s",
        f"data wait {100 * record[DATA_WAIT]:.0f} %",
        *([f"goodput {100 * record[GOODPUT]:.0f} %"] if GOODPUT in record else []),
        f"bad {record[BAD_SAMPLES]}",
    ]
    parts += [f"{name} {record[key]:.1f} %" for name, key in SCORES.items() if key in record]
    return "  ".join(parts)
