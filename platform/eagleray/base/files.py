"""Files shared between processes: atomic writes, JSON lines, locks and the cache folder."""

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from platformdirs.unix import Unix

from eagleray.base.contexts import on_error
from eagleray.base.errors import Busy, UserError, explained

log = logging.getLogger(__name__)
LARGE = 2**53  # whole numbers from here on are not counted up to
# What reading the fields of a stranger's JSON may raise.
NO_JSON = (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError)
LOCK = ".lock"  # the file of a folder that its writing process locks
LATE = "%s: %s; new lines are kept in memory until there is room"


@contextlib.contextmanager
def atomic_path(path: Path, *, part: Path | None = None) -> Iterator[Path]:
    """Yield a temporary path that becomes `path` when the block ends, so that readers never see half a file.

    If the block raises, `path` stays as it was. `part` sets the temporary path, for callers to whom its name matters;
    it must be on the same file system as `path`.
    """
    # No two writers share it, also not threads, or processes of two machines that have the same number.
    part = part or path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def durable_path(path: Path, *, part: Path | None = None) -> Iterator[Path]:
    """Yield a temporary path as `atomic_path` does, and flush the file and its name to the disk when the block ends.

    It is for files that nothing compares with a checksum: a power loss could leave the name with other content."""
    with atomic_path(path, part=part) as temporary:
        yield temporary
        sync_file(temporary)
    sync_folder(path.parent)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a small file and flush it and its folder to the disk, so that readers see the old content or the new, also
    after a power loss."""
    # One name for all writers: the next one overwrites what a killed one left.
    with atomic_path(path, part=path.with_name(f".{path.name}.part")) as part, part.open("wb") as f:
        f.write(content.encode() if isinstance(content, str) else content)
        f.flush()
        os.fsync(f.fileno())
    sync_folder(path.parent)


def writing(name: str) -> contextlib.AbstractContextManager[None]:
    """Turn an error of the file system in a block into UserError, which says that `name` cannot be written."""
    return explained(f"{name}: cannot be written", OSError)


def check_local(option: str, path: Path) -> None:
    """Raise UserError for a URL, whose scheme would become a folder here."""
    if url := re.fullmatch(r"(\w+):/+(.*)", str(path)):
        raise UserError(f"{option} {url[1]}://{url[2]}: expected a path of this machine, not a URL")


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk: what was renamed or created in it is still there after a power loss."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as e:
        if e.errno != errno.EINVAL:  # some file systems cannot, and keep names as they can
            raise
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Flush the content of a file to the disk."""
    with path.open("rb") as f:
        os.fsync(f.fileno())


def make_folder(folder: Path) -> None:
    """Create a folder and those above it, and flush their names to the disk."""
    missing = [f for f in (folder, *folder.parents) if not f.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for created in missing:
        sync_folder(created.parent)


def cache_folder(name: str) -> Path:
    """Return a folder of the user's cache, $XDG_CACHE_HOME/eagleray/`name` or ~/.cache/eagleray/`name`.

    All of its content can be recreated, so it is safe to delete.
    """
    return Unix("eagleray").user_cache_path / name  # the same folders on every system


class JsonLines:
    """Appends records to a file such as `metrics.jsonl`, one JSON object per line.

    The file is opened for each call. Records that do not fit on a full disk are kept and written with later ones, or by
    a call without any."""

    def __init__(self, path: Path, *, step: int | None = None, lines: int | None = None) -> None:
        """Continue a file; after a step or after so many `lines`, if one is given: later lines are dropped, as their
        steps will be repeated."""
        self._path = path
        self._late: list[Mapping[str, Any]] = []
        self.count = lines or 0  # counts records only where `lines` says how many there were
        # As `append_lines` wrote them: what is kept of the file has the same bytes as before.
        if step is not None:
            write_atomic(path, _as_lines(r for r in read_history(path) if r["step"] <= step))
        if lines is not None:
            write_atomic(path, _as_lines(read_lines(path)[:lines]))

    def log(self, *records: Mapping[str, Any]) -> None:
        """Append records."""
        self.count += len(records)
        known, self._late = len(self._late), [*self._late, *records]
        if not self._late:
            return
        try:
            append_lines(self._path, self._late)
        except OSError as e:
            if not known:
                log.warning(LATE, self._path, e.strerror)
            return
        self._late = []


def read_history(path: Path) -> list[dict[str, Any]]:
    """Read a file of the steps of a run, such as `metrics.jsonl`, and skip what is no record of a step."""
    return history(read_lines(path))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read metrics.jsonl, whose values are numbers, and leave out what is none."""
    return [{k: v for k, v in r.items() if is_number(v)} for r in read_history(path)]


def is_number(value: Any) -> bool:
    """Return whether a value of a JSON file is a number that arrays can hold; it may be NaN."""
    return type(value) is float or (type(value) is int and abs(value) < LARGE)


def history(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records that tell their step."""
    return [r for r in records if type(r.get("step")) is int and 0 <= r["step"] < LARGE]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a file with a JSON object on each line, and skip lines that a killed writer left half written."""
    # splitlines would also split at other characters, which a text may contain.
    return parse_lines(path.read_text(errors="replace").split("\n")[:-1]) if path.exists() else []


def parse_lines(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Return the JSON objects of lines. Lines that a killed writer left half written are skipped, and so is other JSON,
    such as a number or lists in lists beyond what Python parses."""
    records = []
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict):
                records.append(record)
    return records


class Tail:
    """Reads the complete lines that are appended to a file, each once, whatever the file's size."""

    def __init__(self, path: Path, *, whole: bool = False) -> None:
        """`whole` begins with the lines that the file has already."""
        self.path = path
        self.offset = path.stat().st_size if path.exists() and not whole else 0

    def lines(self) -> list[str]:
        """Return the lines that were completed since the last call.

        A file that became shorter, as a run that goes back to a checkpoint drops lines, is followed from its new end.
        """
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            self.offset = min(self.offset, os.fstat(file.fileno()).st_size)
            file.seek(self.offset)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self.offset += len(complete)
        return complete.decode(errors="replace").split("\n")[:-1]


def append_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Append objects to a file, each on a line of its own, also after a line that was left half written.

    Raises OSError, with the file as it was, when they do not fit on the disk."""
    data = _as_lines(records)
    with path.open("a+b", buffering=0) as f:
        size = f.tell()
        if size:
            f.seek(-1, os.SEEK_END)
            data = data if f.read(1) == b"\n" else b"\n" + data
        rest = memoryview(data)
        with on_error(lambda: os.ftruncate(f.fileno(), size)):
            while rest:
                rest = rest[f.write(rest) :]


def _as_lines(records: Iterable[Mapping[str, Any]]) -> bytes:
    return b"".join(json.dumps(r, ensure_ascii=False).encode(errors="replace") + b"\n" for r in records)


@contextlib.contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, which is created if it is missing, while the block runs."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def lock_folder(folder: Path, name: str = LOCK, *, patience: float = 0.0, note: str = "") -> IO[str]:
    """Lock a folder, by the file of this name in it, until the returned file is closed.

    Raises Busy when another process still holds the lock after `patience` seconds, and UserError when the file system
    has no locks. `note` is written into the file, for those to read.
    """
    file = (folder / name).open("a+")
    end = time.monotonic() + patience
    with on_error(file.close):
        while not _locked(file, fcntl.LOCK_EX):
            if time.monotonic() >= end:
                file.seek(0)
                raise Busy(f"out={folder}: {file.read().strip() or 'another process'} is still using this folder")
            time.sleep(0.2)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}{note}")
        file.flush()
    return file


def _locked(file: IO[str], kind: int) -> bool:
    """Return whether this process has got a lock on a file. Raises UserError where the file system has none."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as e:
        if e.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise
        raise UserError(
            f"out={Path(file.name).parent}: this file system has no locks ({e.strerror}), which keep two commands from "
            "writing one run; mount it with them (Lustre: -o flock), or give another out= (XDG_CACHE_HOME, if a cache)"
        ) from None
    return True


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock of a file, such as that of a folder."""
    if not path.exists():
        return False
    with path.open() as file:
        return not _locked(file, fcntl.LOCK_SH)
