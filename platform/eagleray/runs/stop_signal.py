"""Ask a run to stop, and learn on every rank that it was asked."""

import contextlib
import logging
import os
import threading
from pathlib import Path

from eagleray.base import dist
from eagleray.base.errors import one_line
from eagleray.runs import layout, remote
from eagleray.storage.store import is_remote

log = logging.getLogger(__name__)
AGAIN = 1.0  # seconds between two attempts to write a request
MARK = 0.0  # the time of a command's lock that stands for a request where no file can be written


class StopRequest:
    """The request of a command that its run saves and stops: an event for a run in this process, a note for others.

    The note holds the id of the command, so that it is no request to another one. It is written again and again until
    that succeeds or the command ends."""

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
                remote.write_note(self.out, layout.STOP, self.command)
                return
            except Exception as e:
                self._mark()
                if one_line(e) != reported:
                    log.warning("the request to stop is not written yet: %s", one_line(e))
                reported = one_line(e)
            self.ended.wait(AGAIN)

    def _mark(self) -> None:
        """Change the time of the lock of this command, for which a full disk has room."""
        if not is_remote(self.out):
            with contextlib.suppress(OSError):
                os.utime(Path(self.out) / layout.COMMAND, (MARK, MARK))


class StopSignal(remote.Background):
    """Watches, on rank 0 alone, whether the run was asked to stop, and tells the other ranks."""

    def __init__(self, out: str, command: str = "", event: threading.Event | None = None) -> None:
        """`command` is the id of the command that the run belongs to, and `event` that of a request in this process."""
        super().__init__("stop-signal")
        self.out, self.command, self.event, self.requested = out, command, event or threading.Event(), False
        if dist.rank() == 0 and (is_remote(out) or dist.size() > 1):
            self.start()

    def tick(self) -> None:
        if not self.requested and self._wanted():
            self.requested = True
            dist.tell(layout.STOP)  # to those that wait for their data; the others hear of it at the next step

    def asked(self) -> bool:
        """Return whether the run was asked to stop, as far as this rank knows."""
        if dist.rank():
            return dist.told(layout.STOP)
        return self.requested or self.event.is_set() or (not is_remote(self.out) and self._wanted())

    def _wanted(self) -> bool:
        """Return whether somebody asks this run to stop: the note of a person is empty, and that of another command is
        none to this one."""
        if not is_remote(self.out):
            if self._marked():
                return True
            if not (Path(self.out) / layout.STOP).exists():
                return False
        note = remote.read_note(self.out, layout.STOP)
        return self.event.is_set() or (note is not None and note.strip() in ("", self.command))

    def _marked(self) -> bool:
        lock = Path(self.out) / layout.COMMAND
        with contextlib.suppress(OSError):
            return lock.stat().st_mtime == MARK and f"({self.command})" in lock.read_text()
        return False

    def close(self) -> None:
        if self.is_alive():
            super().close()
