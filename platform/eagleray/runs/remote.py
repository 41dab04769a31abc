"""Store a run at an s3:// URL: copy its files between the store and the working folder of each machine."""

import contextlib
import logging
import math
import shutil
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

from eagleray.base import files
from eagleray.base.errors import Outage, Superseded, UserError, one_line
from eagleray.runs import layout, lease
from eagleray.runs.histories import GROWING, History, Upload, checksums, histories
from eagleray.storage import store
from eagleray.storage.store import is_remote

log = logging.getLogger(__name__)
SECONDS = 3.0  # between two checks for changes
RATE = 64 * 2**10  # bytes per second at which a file that changes is uploaded at most, but for checkpoints
OVERLAP = 4096  # bytes of a growing file that are fetched again, to see that it is the same file
WORK = "work"  # the folder of a remote run's working files in the cache of a machine
RECORDS = {layout.RECIPE, layout.ENVIRONMENT, layout.SUMMARY, layout.HEALTH_PLOT, layout.MLFLOW}
RECORDS |= {layout.PLACES, layout.START_SCORES}  # files that are written as a whole
NOTES = {layout.RESULTS, layout.FORECAST, layout.CHOICE}  # files that commands write into the store themselves


def work_dir(out: str) -> Path:
    """Return the folder on this machine that a rank writes to. For a remote run it is in the cache."""
    return _cache_dir(out, WORK) if is_remote(out) else Path(out)


def view_dir(out: str) -> Path:
    """Return the folder on this machine that a command reads from. For a remote run it is not the working folder, as
    a rank of the run may be on this machine too."""
    return _cache_dir(out, "view") if is_remote(out) else Path(out)


def _cache_dir(out: str, kind: str) -> Path:
    return files.cache_folder("runs") / f"{out.rstrip('/').rpartition('/')[2]}-{zlib.crc32(out.encode()):08x}" / kind


def write_note(out: str, name: str, text: str) -> None:
    """Write a small file into the run folder, for other processes of the run."""
    store.put_bytes(f"{out}/{name}", text.encode())


def read_note(out: str, name: str) -> str | None:
    url = f"{out}/{name}"
    try:
        return store.store(url).get(url).decode()
    except FileNotFoundError:
        return None


def delete_note(out: str, name: str) -> None:
    url = f"{out}/{name}"
    store.store(url).delete(url)


def check_writable(out: str) -> None:
    """Create the run folder. Raises UserError when nothing can be written to it."""
    try:
        view_dir(out).mkdir(parents=True, exist_ok=True)
        write_note(out, ".probe", " " * 4096)  # a full disk has room for the name of a file, and for no content
        delete_note(out, ".probe")
    except OSError as e:
        raise UserError(f"out={out}: cannot be written: {e.strerror or e}") from None
    except Outage as e:
        raise UserError(f"out={out}: cannot be written: {e}") from None


def is_running(out: str) -> bool:
    """Return whether a process is working on the run, as far as this machine can tell."""
    if is_remote(out):
        owner = lease.holder(out, layout.OWNER)
        return owner is not None and owner.alive
    return files.is_folder_locked(Path(out))


def _has_checkpoints(out: str) -> bool:
    return any(store.store(out).list(f"{out}/{layout.CHECKPOINTS}/", "step-"))


def forget(folder: Path) -> None:
    """Delete a copy on this machine of a run that its store no longer has, or another run would go on with it."""
    for name in (*RECORDS, *GROWING, *NOTES):
        (folder / name).unlink(missing_ok=True)
    for name in (layout.EXPORT, layout.CHECKPOINTS, layout.TENSORBOARD, layout.WANDB, layout.PROFILE, "pictures"):
        shutil.rmtree(folder / name, ignore_errors=True)


FETCH_LOCK = ".fetch"  # the file that a process locks while it downloads into a folder


def fetch_in_turn(out: str, folder: Path) -> None:
    """Download the files of a remote run that have changed, by one process of this machine at a time, such as those of
    an evaluation. Raises UserError and Outage."""
    folder.mkdir(parents=True, exist_ok=True)
    with files.file_lock(folder / FETCH_LOCK):
        Copy(out, folder).fetch()


class Copy:
    """A folder on this machine with a copy of a remote run."""

    def __init__(self, out: str, folder: Path, inside: str = "export") -> None:
        """The copy holds the records and histories of the run and the files in one of its folders, `inside`."""
        self.out, self.folder, self.inside = out, folder, inside
        self.tags: dict[str, object] = {}
        self.histories: dict[str, History] = {}  # as they were listed last
        self.begun = False  # whether the store had a recipe or a history then

    def fetch(self) -> None:
        """Download the files that have changed.

        A file that is longer on this machine is not replaced: rank 0 of the run is on this machine, and the store is
        behind it. Raises UserError and Outage.
        """
        if not is_remote(self.out):
            return
        try:
            self._fetch()
        except UserError:  # a file has been replaced since it was listed, or else the error comes again
            self._fetch()

    def _fetch(self) -> None:
        here, inside = (list(store.store(self.out).list(f"{self.out}/{f}")) for f in ("", f"{self.inside}/"))
        self.histories = histories(here)
        self.begun = bool(self.histories) or any(b.url == f"{self.out}/{layout.RECIPE}" for b in here)
        for name, history in self.histories.items():
            if self.tags.get(name) != history.tag:
                if not _append(history, self._path(name)):
                    _replace(history.read(), self._path(name))
                self.tags[name] = history.tag
        for blob in inside + [b for b in here if b.url.rpartition("/")[2] in (*RECORDS, *NOTES)]:
            if self.tags.get(blob.url) == blob.tag:
                continue
            try:
                data = store.store(blob.url).get(blob.url)
            except FileNotFoundError:
                continue
            _replace(data, self._path(blob.url.removeprefix(f"{self.out}/")))
            self.tags[blob.url] = blob.tag

    def is_stale(self) -> bool:
        """Return whether the store, when it was listed, had nothing of a run: one that is here has been deleted."""
        return is_remote(self.out) and not (self.begun or _has_checkpoints(self.out))

    def _path(self, name: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


def _append(history: History, path: Path) -> bool:
    """Fetch what a history in the store has more than its copy here, and append it, so that readers of the copy can go
    on. Returns whether that was possible."""
    size = path.stat().st_size if path.exists() else 0
    if not 0 < size <= history.size:
        return False
    start = max(size - OVERLAP, 0)
    data = history.read(start)
    with path.open("rb+") as f:
        f.seek(start)
        if f.read() != data[: size - start]:
            return False
        f.write(data[size - start :])
    return True


def _replace(data: bytes, path: Path) -> None:
    """Write a whole file, unless the copy here is ahead of it."""
    if not path.exists() or not path.read_bytes().startswith(data):
        files.write_atomic(path, data)


class Background(threading.Thread):
    """A thread that calls `tick` every few seconds until it is closed; each failure is logged once."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.ended = threading.Event()
        self.reported = ""

    def tick(self) -> None:
        """Do the work once; every subclass defines it."""
        raise NotImplementedError

    def run(self) -> None:
        while not self.ended.wait(SECONDS):
            try:
                self.tick()
            except Exception as e:  # such as of a note that somebody else has written; the next tick may succeed
                known = isinstance(e, UserError | Outage | OSError)
                line = str(e) if known else f"{type(e).__name__}: {one_line(e)}"
                if line != self.reported:
                    log.warning("%s", line, exc_info=not known)
                self.reported = line

    def close(self) -> None:
        self.ended.set()
        self.join()


class Follower(Background):
    """A context that keeps a local copy of a remote run up to date."""

    def __init__(self, out: str) -> None:
        super().__init__("follow-remote")
        self.out, self.copy = out, Copy(out, view_dir(out))

    def tick(self) -> None:
        self.copy.fetch()

    def __enter__(self) -> "Follower":
        if is_remote(self.out):
            self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_alive():
            self.close()
            self.copy.fetch()


class Mirror(Background):
    """Uploads rank 0's working folder to a remote run, and gives signs that the run is alive.

    Raises Busy when a rank of another command is working on the run. A rank of the same command is superseded: it must
    have hung, or Ray would not have started this one.
    """

    def __init__(self, out: str, command: str, after: int = 0) -> None:
        """The epoch of its lease is above `after`."""
        super().__init__("mirror")
        self.out, self.folder = out, work_dir(out)
        self.lease = lease.Lease(out, layout.OWNER, command)
        self.lost = False  # another process has taken the run over
        self.sent: dict[Path, tuple[int, int]] = {}
        self.due: dict[Path, float] = {}  # when a file may be uploaded again
        self.uploads: dict[Path, Upload] = {}  # of the histories
        self.checked = -math.inf  # when the lease was found held for the last time
        self.lock = threading.Lock()
        self.lease.claim(after)
        self.renewed = time.monotonic()
        self.fetch()
        self.start()

    def fetch(self) -> None:
        """Bring the files of earlier starts to this machine, and delete parts of histories that no longer count."""
        epoch, starts = self.lease.epoch, files.read_lines(self.folder / layout.STARTS)
        copy = Copy(self.out, self.folder)
        copy.fetch()
        own = bool(starts) and starts[-1].get("command") == self.lease.command  # killed before the first upload
        if not (own or copy.histories or _has_checkpoints(self.out)):
            forget(self.folder)
            copy = Copy(self.out, self.folder)
            copy.fetch()
        if id := read_note(self.out, layout.WANDB_ID):  # by which the starts of a run are one run there
            (self.folder / layout.WANDB).mkdir(exist_ok=True)
            files.write_atomic(self.folder / layout.WANDB_ID, id)
        for name in GROWING:
            path, history = self.folder / name, copy.histories.get(name)
            sums = checksums(path, history.whole) if history else []
            self.uploads[path] = Upload(self.out, name, epoch, sums)
            for part in history.replaced if history else ():
                if part.epoch < epoch:
                    store.store(self.out).delete(part.blob.url)

    def check(self) -> None:
        """Raises Superseded when another process has taken the run over, and Outage when the store does not say."""
        with self.noting_loss():
            self.lease.check()

    @contextlib.contextmanager
    def noting_loss(self) -> Iterator[None]:
        """Note that the lease is lost where it is found to be: nothing is uploaded from then on."""
        try:
            yield
        except Superseded:
            self.lost = True
            raise

    def tick(self) -> None:
        if self.lost:
            return
        if time.monotonic() > self.renewed + lease.BEAT:
            with self.noting_loss():
                self.lease.renew()
            self.renewed = time.monotonic()
        self.copy(at_once=False)

    def paths(self) -> list[Path]:
        """Return the files to upload, in the order in which they are; some may not exist yet."""
        return (
            [self.folder / n for n in sorted(RECORDS | GROWING)]
            + [p for name in (layout.EXPORT, layout.PROFILE) for p in sorted(self.folder.glob(f"{name}/[!.]*"))]
            + self.of_sinks()
        )

    def of_sinks(self) -> list[Path]:
        """Return the files of TensorBoard and Weights & Biases."""
        paths = [p for name in (layout.TENSORBOARD, layout.WANDB) for p in (self.folder / name).rglob("*")]
        return sorted(p for p in paths if p.is_file() and not p.is_symlink())

    def copy(self, *, at_once: bool = True) -> None:
        """Upload what has changed, of histories their last parts alone; not `at_once`, files of which much was uploaded
        recently wait.

        Raises Superseded when another process has taken the run over, UserError, Outage and OSError.
        """
        with self.lock:
            self.checked = -math.inf
            for path in self.paths():
                if not path.exists():
                    continue
                stat, late = path.stat(), time.monotonic() >= self.due.get(path, 0.0)
                if self.sent.get(path) != (stat.st_mtime_ns, stat.st_size) and (at_once or late):
                    self.due[path] = self._send(path) / RATE + time.monotonic()
                    self.sent[path] = (stat.st_mtime_ns, stat.st_size)

    def _send(self, path: Path) -> int:
        """Upload a file as it is now, and return the number of bytes; it may grow meanwhile."""
        if path in self.uploads:
            return self.uploads[path].send(path, self._put, self._discard)
        data = path.read_bytes()
        self._put(f"{self.out}/{path.relative_to(self.folder)}", data)
        return len(data)

    def _put(self, url: str, data: bytes) -> None:
        self._still_mine()
        store.put_bytes(url, data)

    def _discard(self, url: str) -> None:
        self._still_mine()
        store.store(url).delete(url)

    def _still_mine(self) -> None:
        while time.monotonic() > self.checked + lease.BEAT:  # it may have stood still, also as it asked
            asked = time.monotonic()
            self.check()
            self.checked = asked

    def close(self) -> None:
        super().close()
        if self.lease.epoch > 1:  # a file that an earlier process sent when it was stopped may have come late
            self.sent = {path: sent for path, sent in self.sent.items() if path.name not in RECORDS}
        try:
            self.copy()
        except (UserError, Outage, OSError) as e:
            log.warning("not all files of %s could be uploaded: %s; the same command uploads the rest", self.folder, e)
        self.lease.release()
