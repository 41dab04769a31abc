"""Do side work whose failure does not end the run: once, or repeatedly in a thread."""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

from eagleray.base.errors import Outage, UserError, one_line

log = logging.getLogger(__name__)


class Background(threading.Thread):
    """A thread that calls `tick` every `seconds` until closed. The same failure is not logged twice in a row."""

    seconds = 3.0

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.ended = threading.Event()
        self.reported = ""

    def tick(self) -> None:
        """Do the work once. Every subclass defines this method."""
        raise NotImplementedError

    def run(self) -> None:
        while not self.ended.wait(self.seconds):
            try:
                self.tick()
            except Exception as e:  # a file may be damaged; the next tick may succeed
                known = isinstance(e, UserError | Outage | OSError)
                line = str(e) if known else f"{type(e).__name__}: {one_line(e)}"
                if line != self.reported:
                    log.warning("%s", line, exc_info=not known)
                self.reported = line

    def close(self) -> None:
        """End the thread, once a tick that is running has ended. A thread that was not started may be closed, too."""
        self.ended.set()
        if self.is_alive():
            self.join()


@contextlib.contextmanager
def side_work(what: str, tell: Callable[[str], None] = log.warning) -> Iterator[None]:
    """A context for optional work of a run, such as a picture.
    A failure does not end the run: `tell` gets a line about it that begins with `what`."""
    try:
        yield
    except Exception as e:  # a package may be missing, a disk full, a server away
        tell(f"{what}: {one_line(e)}")
