"""Upload the working folder of rank 0 to the bucket of its run."""

import contextlib
import logging
import math
import threading
import time
from pathlib import Path

from eagleray.base import files
from eagleray.base.errors import Outage, UserError
from eagleray.runs import layout, lease
from eagleray.runs.background import Background
from eagleray.runs.copy_of_run import RECORDS, Copy, forget
from eagleray.runs.histories import GROWING, Upload
from eagleray.runs.lease import Lease
from eagleray.storage import store

log = logging.getLogger(__name__)
SOON, LATEST = 3.0, 60.0  # seconds to the first upload, and at most between two


class Mirror(Background):
    """Uploads what has changed, at each checkpoint and at least once a minute, while this process holds the run."""

    def __init__(self, out: str, folder: Path, claim: Lease) -> None:
        super().__init__("mirror")
        self.out, self.folder, self.claim, self.seconds = out, folder, claim, SOON
        self.sent: dict[Path, tuple[int, int]] = {}
        self.uploads: dict[Path, Upload] = {}  # there is one for each history
        self.checked = -math.inf  # the lease was found held at this time
        self.lock = threading.Lock()
        self._fetch()

    def _fetch(self) -> None:
        """Bring the files of earlier starts to this machine, and delete parts of histories that no longer count."""
        starts = files.read_lines(self.folder / layout.STARTS)
        copy = Copy(self.out, self.folder, may_be_ahead=True)
        copy.fetch()
        # A start of this command that was killed before it had sent anything has left the store behind, not empty.
        killed = bool(starts) and starts[-1].get("command") == self.claim.command
        if not (killed or copy.has_run):
            forget(self.folder)
            copy = Copy(self.out, self.folder)
            copy.fetch()
        with contextlib.suppress(FileNotFoundError):  # the id by which the starts of a run are one run there
            id = store.store(self.out).get(f"{self.out}/{layout.WANDB_ID}")
            (self.folder / layout.WANDB).mkdir(exist_ok=True)
            files.write_atomic(self.folder / layout.WANDB_ID, id)
        for name in GROWING:
            path, history = self.folder / name, copy.histories.get(name)
            self.uploads[path] = Upload(self.out, path, self.claim.epoch, history.whole if history else 0)
            for part in history.replaced if history else ():
                if part.epoch < self.claim.epoch:
                    store.store(self.out).delete(part.blob.url)

    def tick(self) -> None:
        self.seconds = min(2 * self.seconds, LATEST)
        if not self.claim.lost:
            self._copy(self._paths())

    def copy(self) -> None:
        """Upload what has changed, of histories what is new. Raises Superseded when another process has taken the run
        over, UserError, Outage and OSError."""
        self._copy(self._paths() + self._of_sinks())

    def _copy(self, paths: list[Path]) -> None:
        with self.lock:
            self.checked = -math.inf
            for path in paths:
                if not path.exists():
                    continue
                stat = path.stat()  # it may grow while it is sent
                if self.sent.get(path) == (now := (stat.st_mtime_ns, stat.st_size)):
                    continue
                if path in self.uploads:
                    self.uploads[path].send(self._put)
                else:
                    self._put(f"{self.out}/{path.relative_to(self.folder)}", path.read_bytes())
                self.sent[path] = now

    def _paths(self) -> list[Path]:
        """Return the files to upload, in the order in which they are; some may not exist yet."""
        whole = [p for name in (layout.EXPORT, layout.PROFILE) for p in sorted(self.folder.glob(f"{name}/[!.]*"))]
        return [self.folder / n for n in sorted(RECORDS | GROWING)] + whole

    def _of_sinks(self) -> list[Path]:
        """Return the files of TensorBoard and Weights & Biases, which are sent whole."""
        paths = [p for name in (layout.TENSORBOARD, layout.WANDB) for p in (self.folder / name).rglob("*")]
        return sorted(p for p in paths if p.is_file() and not p.is_symlink())

    def _put(self, url: str, data: bytes) -> None:
        if time.monotonic() > self.checked + lease.BEAT:
            self.checked = time.monotonic()
            self.claim.check()
            if time.monotonic() > self.checked + lease.BEAT:  # this process, or the store, stood still
                raise Outage(f"{self.out}: takes over {lease.BEAT:.0f} s to say whether this process holds the run")
        store.put_bytes(url, data)

    def close(self) -> None:
        super().close()
        if self.claim.epoch > 1:  # a file that an earlier process sent when it was stopped may have come late
            self.sent = {path: sent for path, sent in self.sent.items() if path.name not in RECORDS}
        try:
            self.copy()
        except (UserError, Outage, OSError) as e:
            log.warning("not all files of %s could be uploaded: %s; the same command uploads the rest", self.folder, e)
