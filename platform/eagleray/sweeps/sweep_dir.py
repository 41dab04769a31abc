"""Reserve the folder of a sweep for one command and, if `out` is a URL, upload its files to the store."""

import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from eagleray.base import files
from eagleray.base.console import say
from eagleray.base.errors import Outage, UserError
from eagleray.runs import layout
from eagleray.runs.background import Background
from eagleray.runs.command import new_command
from eagleray.runs.layout import SWEEP, SWEEP_FILES
from eagleray.runs.lease import Lease
from eagleray.runs.run_store import FolderClaim, RunStore, run_store
from eagleray.storage.store import may_be_folder

log = logging.getLogger(__name__)
STORED = (*SWEEP_FILES, layout.ENVIRONMENT, layout.MLFLOW)


def sweep_folder(out: str) -> Path | None:
    """Return the folder of the sweep in `out`, or a copy on this machine if `out` is a URL; None if it holds no sweep.
    Raises UserError and Outage when `out` cannot be read."""
    run = run_store(out)
    return run.fetch() if may_be_folder(out) and run.get(SWEEP) is not None else None


class Uploads(Background):
    """Stores the changed files of a sweep, once a minute and when `upload` is called."""

    seconds = 60.0

    def __init__(self, run: RunStore, claim: FolderClaim | Lease) -> None:
        super().__init__("uploads-of-sweep")
        self.store, self.claim, self.lock = run, claim, threading.Lock()
        self.sent: dict[str, tuple[int, int]] = {}

    def tick(self) -> None:
        with self.lock:
            self.claim.check()
            for name in STORED:
                if (path := self.store.work / name).exists():
                    now = (stat := path.stat()).st_mtime_ns, stat.st_size
                    if self.sent.get(name) != now:
                        self.store.share(path)
                        self.sent[name] = now

    def upload(self) -> None:
        """Store the changed files now. A failure is only logged, as the next call stores the files that are missing."""
        try:
            self.tick()
        except (UserError, Outage, OSError) as e:
            log.warning("%s", e)


@contextmanager
def open_sweep_dir(out: str) -> Iterator[Uploads]:
    """A context that reserves the sweep in `out` for this command, and yields the uploads of its changed files.
    Raises UserError when another command has reserved it."""
    run = run_store(out)
    with ExitStack() as stack:
        with files.writing(f"out={out}"):
            claim = run.claim(layout.COMMAND, new_command(), say)
        stack.callback(claim.close)
        run.fetch(work=True)
        uploads = Uploads(run, claim)
        uploads.start()
        stack.callback(uploads.upload)
        stack.callback(uploads.close)
        yield uploads
