"""Ask a run to save and stop. A command or a person can ask, and rank 0 watches for their requests.

A command that only waits for a run on Ray imports this, so it must not import PyTorch."""

import contextlib
import threading
from collections.abc import Callable, Iterator

from eagleray.base.errors import Outage, UserError, one_line
from eagleray.runs import layout
from eagleray.runs.background import Background
from eagleray.runs.run_store import run_store


class StopRequest(Background):
    """A command's request that its run saves a checkpoint and stops.

    A run in this process sees `event`; other processes see a marker file. Its name ends with the id of the command, so
    that runs of other commands ignore it, and it is empty, so that it fits on a full disk. Writing is repeated until it
    succeeds or the command ends."""

    seconds = 0.2

    def __init__(self, out: str, command: str) -> None:
        super().__init__("ask-to-stop")
        self.out, self.command, self.event = out, command, threading.Event()
        self.time_over = False  # whether the run was asked to stop by the time limit of `after`

    def ask(self) -> None:
        """Ask the run to stop. May be called from a signal handler, which may interrupt a request to the store."""
        if not self.event.is_set():
            self.event.set()
            self.start()

    @contextlib.contextmanager
    def after(self, hours: float | None, say: Callable[[str], None]) -> Iterator[None]:
        """A context in which the run is asked to stop after `hours` hours, unless it was asked before. None: never."""

        def ask() -> None:
            if not self.event.is_set():
                self.time_over = True
                self.ask()
                say(f"the {hours:g} hours of --max-hours are over: stopping after this step")

        timer = threading.Timer(min(3600 * (hours or 0), threading.TIMEOUT_MAX), ask)
        timer.daemon = True
        if hours is not None:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def tick(self) -> None:
        try:
            run_store(self.out).put(notes_of(self.command)[1], "")
        except (UserError, Outage, OSError) as e:
            raise Outage(f"the request to stop is not written yet: {one_line(e)}") from None
        self.ended.set()

    def close(self) -> None:
        """Give up writing, as the run has ended, without waiting for a store that does not answer."""
        self.ended.set()


def notes_of(command: str) -> tuple[str, str]:
    """Return the names of two marker files that ask the run of a command to stop: a person's and the command's."""
    return layout.STOP, f"{layout.STOP}-{command}"


def check_hours(hours: float | None) -> None:
    """Raises UserError when `hours` is negative or NaN."""
    if hours is not None and not hours >= 0:  # this is also true of NaN
        raise UserError(f"--max-hours {hours:g}: expected a number of hours, 0 or more")
