"""Keep the files of a run in a bucket: rank 0 uploads its working folder, and commands read from a local copy.

A growing file, called a history, is stored in parts, so that an upload does not get larger as the run gets longer. A
part is named by its file, the epoch of its writer's lease and the byte at which it begins, such as
`metrics.jsonl-e000002-000000131072`. From its first byte on it replaces all parts of earlier epochs. So a writer that
has lost the run cannot change what its successor has sent, and the first part of a new start removes the lines that
this start drops."""

import contextlib
import logging
import math
import re
import shutil
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from eagleray.base import files
from eagleray.base.contexts import on_error
from eagleray.base.errors import Outage, UserError
from eagleray.runs import layout, lease
from eagleray.runs.background import Background, side_work
from eagleray.runs.lease import Lease
from eagleray.runs.run_store import PATIENCE as HELD
from eagleray.runs.run_store import FolderClaim, RunStore, Say
from eagleray.storage import store
from eagleray.storage.blob import Blob
from eagleray.storage.ordered_map import ordered_map

log = logging.getLogger(__name__)
PART = 2**17  # bytes of a part; only the last part of a file is smaller, and is replaced as the file grows
GROWING = {layout.LOG, layout.METRICS, layout.STEPS, layout.HEALTH}
GROWING |= {layout.QUARANTINE, layout.SKIPPED, layout.STARTS}
NAMED = re.compile(r"(.+)-e(\d+)-(\d+)")
RECORDS = {layout.RECIPE, layout.ENVIRONMENT, layout.SUMMARY, layout.HEALTH_PLOT, layout.NEIGHBOURS, layout.MLFLOW}
RECORDS |= {layout.PLACES, layout.START_SCORES, layout.EVALUATION}  # files that rank 0 writes as a whole
RECORDS |= {layout.MATERIALS}
# Files that commands write, not rank 0.
NOTES = {layout.RESULTS, layout.FORECAST, layout.CHOICE, layout.FORGOTTEN, *layout.SWEEP_FILES}
OVERLAP = 4096  # last bytes of a copied history that are downloaded again, to check that it still has the same content
LOCK = ".fetch"  # the file that a process locks while it downloads into a folder
PATIENCE = 600.0  # seconds to wait for another process that downloads into the same folder
SOON, LATEST = 3.0, 60.0  # seconds until the first upload, and most seconds between two uploads


@dataclass(frozen=True)
class HistoryPart:
    """A file in the store that holds a history from byte `start` on."""

    epoch: int
    start: int
    blob: Blob

    @property
    def end(self) -> int:
        return self.start + self.blob.size


class History:
    """A growing file, made up of the parts that the store lists."""

    def __init__(self, parts: Iterable[HistoryPart]) -> None:
        self.parts: list[HistoryPart] = []
        self.replaced: list[HistoryPart] = []  # parts that later ones have replaced
        for part in sorted(parts, key=lambda p: (p.epoch, p.start)):
            while self.parts and self.parts[-1].start >= part.start:
                self.replaced.append(self.parts.pop())
            self.parts.append(part)
        ends = [*(after.start for after in self.parts[1:]), self.parts[-1].end]
        self.lengths = [min(p.blob.size, end - p.start) for p, end in zip(self.parts, ends, strict=True)]
        self.size, self.end = sum(self.lengths), self.parts[-1].end
        self.tag = [(p.blob.url, p.blob.tag) for p in self.parts]

    @property
    def whole(self) -> int:
        """Return the number of bytes before the first gap. A gap arises when a server carries out an early upload of a
        part after a later one, so that the part gets shorter again."""
        gaps = (before.end for before, after in pairwise(self.parts) if before.end < after.start)
        return 0 if self.parts[0].start else next(gaps, self.end)

    def read(self, start: int = 0) -> bytes:
        """Return the content from byte `start` on. Raises UserError if a part was deleted, Outage if none is read."""
        wanted, at = list[tuple[str, int, int]](), 0
        for part, length in zip(self.parts, self.lengths, strict=True):
            if (skipped := max(start - at, 0)) < length:
                wanted.append((part.blob.url, skipped, length - skipped))
            at += length
        return b"".join(ordered_map(lambda one: bytes(store.store(one[0]).read(*one)), wanted))


def histories(blobs: Iterable[Blob]) -> dict[str, History]:
    """Return the histories whose parts are among the files of a run's folder, by name."""
    parts = defaultdict[str, list[HistoryPart]](list)
    for blob in blobs:
        if (match := NAMED.fullmatch(blob.url.rpartition("/")[2])) and match[1] in GROWING:
            parts[match[1]].append(HistoryPart(int(match[2]), int(match[3]), blob))
    return {name: History(found) for name, found in parts.items()}


def part_url(out: str, name: str, epoch: int, start: int) -> str:
    return f"{out}/{name}-e{epoch:06d}-{start:012d}"


class Upload:
    """Uploads a growing file in parts.

    When the file has grown, its last part is sent again. A new start of the run first sends the first part that differs
    from the store or, if all complete parts are equal, the last, incomplete one. So it replaces what an earlier process
    may send late. A process that dies between two requests leaves the beginning of the file in the store, without gaps
    or repeated lines."""

    def __init__(self, out: str, path: Path, epoch: int, whole: int = 0) -> None:
        """The store has the first `whole` bytes of the file. After the first call of `send` the file may only grow."""
        self.out, self.path, self.epoch = out, path, epoch
        self.start = self.size = -1  # first byte of the last part, and number of bytes sent; -1: nothing was sent yet
        self.stored = _checksums(path, whole)

    def send(self, put: Callable[[str, bytes], None]) -> None:
        """Send what is new in the file, except an incomplete line at its end."""
        if self.start < 0:
            pairs = zip(self.stored, _checksums(self.path, self.path.stat().st_size), strict=False)
            self.start = PART * next((n for n, (one, other) in enumerate(pairs) if one != other), len(self.stored))
            self.start = min(self.start, self.path.stat().st_size // PART * PART)
        with self.path.open("rb") as file:
            file.seek(self.start)
            data = file.read()
        data = data[: data.rfind(b"\n") + 1]
        while self.start + len(data) != self.size:
            put(part_url(self.out, self.path.name, self.epoch, self.start), data[:PART])
            if len(data) < PART:
                self.size = self.start + len(data)
            else:
                self.start, data = self.start + PART, data[PART:]


def _checksums(path: Path, size: int) -> list[int]:
    """Return a checksum of each complete part in the first `size` bytes of a file."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        return [zlib.crc32(file.read(PART)) for _ in range(size // PART)]


class RunCopy(Background):
    """A copy on this machine of a run's RECORDS, NOTES and histories, and of the files in its subfolder `inside`.

    As a context manager it keeps the copy up to date."""

    def __init__(self, out: str, folder: Path, inside: str = layout.EXPORT, *, may_be_ahead: bool = False) -> None:
        """`may_be_ahead` is for the folder that rank 0 writes: content that the store does not have yet is kept."""
        super().__init__("copy-of-run")
        assert store.folder_of(out) is None, f"{out}: would be deleted as a copy of itself"
        self.out, self.folder, self.inside, self.may_be_ahead = out, folder, inside, may_be_ahead
        self.tags: dict[str, object] = {}
        self.histories: dict[str, History] = {}  # the histories in the last listing, by name
        self.has_run = False  # whether the last listing had anything that a rank has written

    def __enter__(self) -> "RunCopy":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self.tick()

    def tick(self) -> None:
        """Download the files that have changed, and delete those that the store no longer has.

        Only one process of this machine does so at a time. Raises Busy when another process takes longer than PATIENCE,
        and UserError or Outage when the store refuses or does not answer."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with files.lock_folder(self.folder, LOCK, patience=PATIENCE):
            try:
                self._fetch()
            except UserError:  # a file may have been replaced after the listing; any other error is raised again
                self._fetch()

    fetch = tick

    def _fetch(self) -> None:
        here, inside = (list(store.store(self.out).list(f"{self.out}/{f}")) for f in ("", f"{self.inside}/"))
        self.histories = histories(here)
        records = [b for b in here if b.url.rpartition("/")[2] in RECORDS | NOTES]
        self.has_run = bool(self.histories or store.store(self.out).list(f"{self.out}/{layout.CHECKPOINTS}/", "step-"))
        if not self.may_be_ahead:
            names = {*self.histories, *(b.url.rpartition("/")[2] for b in records)}
            forget(self.folder, names, folders=not (names or self.has_run))
        for name, history in self.histories.items():
            if self.tags.get(name) != history.tag:
                self._fetch_history(history, self._path(name))
                self.tags[name] = history.tag
        for blob in inside + records:
            if self.tags.get(blob.url) == blob.tag:
                continue
            if (data := store.find(blob.url)) is not None:
                self._replace(self._path(blob.url.removeprefix(f"{self.out}/")), data)
                self.tags[blob.url] = blob.tag

    def _fetch_history(self, history: History, path: Path) -> None:
        """Append what the copy at `path` lacks, so that its readers can go on. If its end differs, replace the copy."""
        size = path.stat().st_size if path.exists() else 0
        start = max(size - OVERLAP, 0)
        if 0 < size <= history.size:
            data = history.read(start)
            with path.open("rb+") as file:
                file.seek(start)
                if file.read() == data[: size - start]:
                    file.write(data[size - start :])
                    return
        self._replace(path, history.read())

    def _replace(self, path: Path, data: bytes) -> None:
        if not (self.may_be_ahead and path.exists() and path.read_bytes().startswith(data)):
            files.write_atomic(path, data)

    def _path(self, name: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


def forget(folder: Path, kept: Collection[str] = (), *, folders: bool = True) -> None:
    """Delete the local copies of a run's files, except those named in `kept`, and with `folders` its subfolders. After
    the run was deleted from the store, they would otherwise become part of the next run at its URL."""
    for name in (RECORDS | GROWING | NOTES).difference(kept):
        (folder / name).unlink(missing_ok=True)
    for name in (layout.EXPORT, layout.CHECKPOINTS, layout.TENSORBOARD, layout.WANDB, layout.PROFILE, layout.PICTURES):
        if folders:
            shutil.rmtree(folder / name, ignore_errors=True)


class Mirror(Background):
    """Uploads the files that have changed, at each checkpoint and once a minute, while this process holds the run."""

    def __init__(self, out: str, folder: Path, claim: Lease) -> None:
        super().__init__("mirror")
        self.out, self.folder, self.claim, self.seconds = out, folder, claim, SOON
        self.sent: dict[Path, tuple[int, int]] = {}
        self.uploads: dict[Path, Upload] = {}  # uploads of the histories, by their paths
        self.checked = -math.inf  # time.monotonic() at which the lease was last checked
        self.lock = threading.Lock()
        self._fetch()

    def _fetch(self) -> None:
        """Download the run's files. In the store, delete parts of growing files that later parts have replaced."""
        starts = files.read_lines(self.folder / layout.STARTS)
        copy = RunCopy(self.out, self.folder, may_be_ahead=True)
        copy.fetch()
        # An earlier start of this command may have been killed before its first upload: then its files are kept.
        killed = bool(starts) and starts[-1].get("command") == self.claim.command
        if not (killed or copy.has_run):
            forget(self.folder)
            copy = RunCopy(self.out, self.folder)
            copy.fetch()
        with contextlib.suppress(FileNotFoundError):  # the id that makes all starts one run in Weights & Biases
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
        """Upload the changed files, and of histories only the new lines. Raises Superseded when another process has
        taken over the run, and UserError, Outage or OSError when a file cannot be read or uploaded."""
        self._copy(self._paths() + self._of_sinks())

    def _copy(self, paths: list[Path]) -> None:
        with self.lock:
            self.checked = -math.inf
            for path in paths:
                if not path.exists():
                    continue
                stat = path.stat()  # the file may grow during the upload
                if self.sent.get(path) == (now := (stat.st_mtime_ns, stat.st_size)):
                    continue
                if path in self.uploads:
                    self.uploads[path].send(self._put)
                else:
                    self._put(f"{self.out}/{path.relative_to(self.folder)}", path.read_bytes())
                self.sent[path] = now

    def _paths(self) -> list[Path]:
        """Return the files to upload, in the order of their uploads. Some may not exist yet."""
        whole = [p for name in (layout.EXPORT, layout.PROFILE) for p in sorted(self.folder.glob(f"{name}/[!.]*"))]
        return [self.folder / n for n in sorted(RECORDS | GROWING)] + whole

    def _of_sinks(self) -> list[Path]:
        """Return the files of TensorBoard and Weights & Biases. A changed file is uploaded as a whole."""
        paths = [p for name in (layout.TENSORBOARD, layout.WANDB) for p in (self.folder / name).rglob("*")]
        return sorted(p for p in paths if p.is_file() and not p.is_symlink())

    def _put(self, url: str, data: bytes) -> None:
        if time.monotonic() > self.checked + lease.BEAT:
            self.checked = time.monotonic()
            self.claim.check()
            if time.monotonic() > self.checked + lease.BEAT:  # this process was suspended, or the store is slow
                raise Outage(f"{self.out}: takes over {lease.BEAT:.0f} s to say whether this process holds the run")
        store.put_bytes(url, data)

    def close(self) -> None:
        super().close()
        if self.claim.epoch > 1:  # send all records again, as late uploads of an earlier process may have replaced some
            self.sent = {path: sent for path, sent in self.sent.items() if path.name not in RECORDS}
        with side_work(f"not all files of {self.folder} could be uploaded, which the same command does"):
            self.copy()


class BucketRun(RunStore):
    """A run in a bucket. The machine of rank 0 uploads the run's files, and machines that read them download them."""

    def __init__(self, out: str) -> None:
        name = f"{out.rstrip('/').rpartition('/')[2]}-{zlib.crc32(out.encode()):08x}"
        cache = files.cache_folder("runs") / name
        self.out, self.view, self.work = out, cache / "view", cache / "work"

    def share(self, path: Path) -> None:
        folder = self.work if path.is_relative_to(self.work) else self.view
        self.put(str(path.relative_to(folder)), path.read_bytes())

    def list(self, start: str = "") -> list[Blob]:
        return store.store(self.out).list(f"{self.out}/", start)

    def append(self, name: str, text: str) -> None:
        history = histories(self.list(name)).get(name)
        last = history.parts[-1].epoch if history else 0
        store.put_bytes(part_url(self.out, name, last, history.end if history else 0), text.encode())

    def fetch(self, inside: str = layout.EXPORT, *, work: bool = False) -> Path:
        RunCopy(self.out, folder := self.work if work else self.view, inside).fetch()
        return folder

    def following(self) -> contextlib.AbstractContextManager[object]:
        return RunCopy(self.out, self.view)

    def lock(self, name: str) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def claim(self, name: str, command: str, say: Say, *, after: int = 0, patience: float = HELD) -> Lease:
        claim = Lease(self.out, name, command)
        claim.claim(after, say)
        claim.start()
        if name == layout.OWNER:  # lock the working folder too, into which a hung rank of this machine might write
            with on_error(claim.close):
                claim.at_end = super().claim(name, command, say, patience=patience).close
        return claim

    def wait_until_free(self, name: str, say: Say) -> None:
        lease.wait_until_silent(self.out, name, say)

    def is_claimed(self, name: str = layout.OWNER) -> bool:
        found = lease.holder(self.out, name)
        return found is not None and found.alive

    def mirror(self, claim: FolderClaim | Lease) -> Mirror:
        assert isinstance(claim, Lease)
        return Mirror(self.out, self.work, claim)
