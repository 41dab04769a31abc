"""Files shared between processes: atomic writes, JSON lines, locks and the cache folder."""

import contextlib
import errno
import fcntl
import json
import logging
import math
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
LARGE = 2**53  # bound of the integers that count as numbers: from here on, float64 does not hold every integer
# Errors that may arise when untrusted JSON is parsed and its fields are read.
NO_JSON = (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError)
LOCK = ".lock"  # name of the file that a process locks while it writes a folder
LATE = "%s: %s; new lines are kept in memory until there is room"


@contextlib.contextmanager
def atomic_path(path: Path, *, part: Path | None = None) -> Iterator[Path]:
    """A context with a temporary path that is renamed to `path` at its end, so that readers never see half a file.

    After an error, `path` is unchanged. `part` is the temporary path, on the same file system as `path`. None: a path
    beside `path`, with a random name."""
    # The id of a process is not enough: threads have the same id, and so may processes on two machines.
    part = part or path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def durable_path(path: Path, *, part: Path | None = None) -> Iterator[Path]:
    """A context as `atomic_path`, which also flushes the file and its name to the disk at its end.

    It is for files without a checksum: after a power loss, nobody would notice a name with incomplete content."""
    with atomic_path(path, part=part) as temporary:
        yield temporary
        sync_file(temporary)
    sync_folder(path.parent)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a small file and flush it and its folder to the disk: readers see the old or new content, even after a
    power loss."""
    # All writers of a file use one temporary name, so what a killed writer leaves is overwritten by the next writer.
    with atomic_path(path, part=path.with_name(f".{path.name}.part")) as part, part.open("wb") as f:
        f.write(content.encode() if isinstance(content, str) else content)
        f.flush()
        os.fsync(f.fileno())
    sync_folder(path.parent)


def writing(name: str) -> contextlib.AbstractContextManager[None]:
    """A context that turns an OSError into a UserError, which says that `name` cannot be written."""
    return explained(f"{name}: cannot be written", OSError)


def check_local(option: str, path: Path) -> None:
    """Raises UserError if the value `path` of `option` is a URL, which would create a folder named after its scheme."""
    if url := re.fullmatch(r"(\w+):/+(.*)", str(path)):
        raise UserError(f"{option} {url[1]}://{url[2]}: expected a path of this machine, not a URL")


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk, so that renamed or created files are still there after a power loss."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as e:
        if e.errno != errno.EINVAL:  # some file systems cannot flush names
            raise
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Flush the content of a file to the disk."""
    with path.open("rb") as f:
        os.fsync(f.fileno())


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents, and flush their names to the disk."""
    missing = [f for f in (folder, *folder.parents) if not f.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for created in missing:
        sync_folder(created.parent)


def cache_folder(name: str) -> Path:
    """Return a folder of the user's cache, $XDG_CACHE_HOME/eagleray/`name` or ~/.cache/eagleray/`name`.

    All of its content can be recreated, so it is safe to delete."""
    return Unix("eagleray").user_cache_path / name  # the same path on every system


class JsonLines:
    """Appends records to a file such as `metrics.jsonl`, one JSON object per line.

    The file is opened for each call. If the disk is full, records are kept in memory until a later call of `log` can
    write them. That call may have no records of its own."""

    def __init__(self, path: Path, *, step: int | None = None, lines: int | None = None) -> None:
        """Continue a file. Given `step`, records of later steps are deleted; given `lines`, all lines after the first
        `lines`: the run repeats their steps."""
        self._path = path
        self._late: list[Mapping[str, Any]] = []
        self.count = lines or 0  # records in the file if `lines` is given, else records logged by this object
        # Lines that stay are written in the same form as by `append_lines`, so that their bytes do not change.
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
    """Read the records that have a valid step from a file such as `metrics.jsonl`. Other lines are skipped."""
    return history(read_lines(path))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the records of metrics.jsonl that have a valid step. Values that are not numbers are left out."""
    return [{k: v for k, v in r.items() if is_number(v)} for r in read_history(path)]


def is_number(value: Any) -> bool:
    """Return whether a JSON value is a float (NaN included) or an integer that float64 holds exactly."""
    return type(value) is float or (type(value) is int and abs(value) < LARGE)


def history(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records with a valid step: a field `step` with an integer from 0 to LARGE (excluded)."""
    return [r for r in records if type(r.get("step")) is int and 0 <= r["step"] < LARGE]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a file with a JSON object on each line. Lines that a killed writer left incomplete are skipped."""
    # `splitlines` is not used: it also splits at characters that a text may contain, such as U+2028.
    return parse_lines(path.read_text(errors="replace").split("\n")[:-1]) if path.exists() else []


def parse_lines(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Return the JSON objects in lines. Other lines are skipped: those that a killed writer left incomplete, other JSON
    such as a number, and JSON that is too deeply nested for Python's parser."""
    records = []
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict):
                records.append(record)
    return records


class Tail:
    """Reads the complete lines that are appended to a file, each once, at a cost that does not grow with the file."""

    def __init__(self, path: Path, *, whole: bool = False) -> None:
        """Begin at the end of the file or, with `whole`, at its beginning."""
        self.path = path
        self.offset = path.stat().st_size if path.exists() and not whole else 0

    def lines(self) -> list[str]:
        """Return the lines that were completed since the last call.

        A run that returns to a checkpoint deletes lines. If the file is now shorter, reading continues at its new end.
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
    """Append records to a file, each on a line of its own, even if the file ends with an incomplete line.

    Raises OSError if the disk is full, and then leaves the file unchanged."""
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
def file_lock(path: Path, *, patience: float = math.inf) -> Iterator[None]:
    """A context in which this process holds an exclusive lock on a file, which is created if it is missing. After
    `patience` seconds, the context begins without the lock."""
    with path.open("a") as file:
        end = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX if math.isinf(patience) else fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < end:
                    time.sleep(0.02)
                    continue
            break
        yield


def lock_folder(folder: Path, name: str = LOCK, *, patience: float = 0.0, note: str = "") -> IO[str]:
    """Lock the file `name` in a folder until the returned file is closed.

    `note` describes this process in the file. Raises Busy, with the other process's note, if another process still
    holds the lock after `patience` seconds, and UserError if the file system has no locks."""
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
    """Try once to lock `file` (`kind`: LOCK_SH or LOCK_EX), and return whether it worked. Raises UserError if the file
    system has no locks."""
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
    """Return whether a process has locked a file, such as the file LOCK in a folder."""
    if not path.exists():
        return False
    with path.open() as file:
        return not _locked(file, fcntl.LOCK_SH)
