"""Ask a run to stop, and learn on every rank that it was asked."""

import logging
import threading

from eagleray.base import dist
from eagleray.base.errors import one_line
from eagleray.runs import layout
from eagleray.runs.background import Background
from eagleray.runs.run_store import run_store

log = logging.getLogger(__name__)
AGAIN = 1.0  # seconds between two attempts to write a request


class StopRequest:
    """The request of a command that its run saves and stops: an event for a run in this process, a note for others.

    The name of the note ends with the id of the command, so that it is no request to another one, and it is empty: a
    full disk has room for that. It is written again and again until that succeeds or the command ends."""

    def __init__(self, out: str, command: str) -> None:
        self.out, self.command = out, command
        self.event, self.ended = threading.Event(), threading.Event()

    def ask(self) -> None:
        """Ask the run to stop. May be called from a handler of signals, which may interrupt a request to the store."""
        if not self.event.is_set():
            self.event.set()
            threading.Thread(target=self._write, name="ask-to-stop", daemon=True).start()

    def close(self) -> None:
        """Give up writing, as the run has ended."""
        self.ended.set()

    def _write(self) -> None:
        reported = ""
        while not self.ended.is_set():
            try:
                run_store(self.out).put(f"{layout.STOP}-{self.command}", "")
                return
            except Exception as e:
                if one_line(e) != reported:
                    log.warning("the request to stop is not written yet: %s", one_line(e))
                reported = one_line(e)
            self.ended.wait(AGAIN)


class StopSignal(Background):
    """Watches, on rank 0 alone, whether the run was asked to stop, and tells the other ranks."""

    def __init__(self, out: str, command: str = "", event: threading.Event | None = None) -> None:
        """`command` is the id of the command that the run belongs to, and `event` that of a request in this process."""
        super().__init__("stop-signal")
        self.run_store, self.event, self.requested = run_store(out), event or threading.Event(), False
        self.notes = (layout.STOP, f"{layout.STOP}-{command}")  # of a person, and of the command
        if dist.rank() == 0:
            self.start()

    def tick(self) -> None:
        if not self.requested and (self.event.is_set() or any(self.run_store.get(n) is not None for n in self.notes)):
            self.requested = True
            dist.tell(layout.STOP)  # to those that wait for their data; the others hear of it at the next step

    def asked(self) -> bool:
        """Return whether the run was asked to stop, as far as this rank knows."""
        return self.requested or self.event.is_set() if dist.rank() == 0 else dist.told(layout.STOP)
