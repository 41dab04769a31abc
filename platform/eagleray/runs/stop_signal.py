"""Ask a run to stop, and learn on every rank that it was asked."""

import threading

from eagleray.base import dist
from eagleray.base.errors import Outage, UserError, one_line
from eagleray.runs import layout
from eagleray.runs.background import Background
from eagleray.runs.run_store import run_store


class StopRequest(Background):
    """The request of a command that its run saves and stops: an event for a run in this process, a note for others.

    The name of the note ends with the id of the command, so that it is no request to another one, and it is empty: a
    full disk has room for that. It is written again and again until that succeeds or the command ends."""

    seconds = 0.2

    def __init__(self, out: str, command: str) -> None:
        super().__init__("ask-to-stop")
        self.out, self.command, self.event = out, command, threading.Event()

    def ask(self) -> None:
        """Ask the run to stop. May be called from a handler of signals, which may interrupt a request to the store."""
        if not self.event.is_set():
            self.event.set()
            self.start()

    def tick(self) -> None:
        try:
            run_store(self.out).put(notes_of(self.command)[1], "")
        except (UserError, Outage, OSError) as e:
            raise Outage(f"the request to stop is not written yet: {one_line(e)}") from None
        self.ended.set()

    def close(self) -> None:
        """Give up writing, as the run has ended; a request to a store that is away is not waited for."""
        self.ended.set()


def notes_of(command: str) -> tuple[str, str]:
    """Return the names of the notes by which a person, and this command, ask its run to stop."""
    return layout.STOP, f"{layout.STOP}-{command}"


class StopSignal(Background):
    """Watches, on rank 0 alone, whether the run was asked to stop, and tells the other ranks."""

    def __init__(self, out: str, command: str = "", event: threading.Event | None = None) -> None:
        """`command` is the id of the command that the run belongs to, and `event` that of a request in this process."""
        super().__init__("stop-signal")
        self.run_store, self.event, self.requested = run_store(out), event or threading.Event(), False
        self.notes = notes_of(command)
        if dist.rank() == 0:
            self.start()

    def tick(self) -> None:
        if not self.requested and (self.event.is_set() or any(self.run_store.get(n) is not None for n in self.notes)):
            self.requested = True
            dist.tell(layout.STOP)  # ranks that wait for their data hear it now, the others at the next step

    def asked(self) -> bool:
        """Return whether the run was asked to stop, as far as this rank knows."""
        return self.requested or self.event.is_set() if dist.rank() == 0 else dist.told(layout.STOP)
