"""Learn on every rank that the run was asked to stop."""

import threading

from eagleray.base import dist
from eagleray.runs import layout
from eagleray.runs.background import Background
from eagleray.runs.run_store import run_store
from eagleray.runs.stop_request import notes_of


class StopSignal(Background):
    """Watches, on rank 0 alone, whether the run was asked to stop, and tells the other ranks."""

    def __init__(self, out: str, command: str = "", event: threading.Event | None = None) -> None:
        """`command` is the id of the command that the run belongs to, `event` that of a StopRequest in this process."""
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
