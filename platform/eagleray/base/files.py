"""Files shared between processes: atomic writes, JSON lines, locks and the cache folder."""

import contextlib
import fcntl
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from platformdirs.unix import Unix

from eagleray.base.errors import UserError

log = logging.getLogger(__name__)


@contextlib.contextmanager
def atomic_path(path: Path, *, part: Path | None = None) -> Iterator[Path]:
    """Yield a temporary path that becomes `path` when the block ends, so that readers never see half a file.

    If the block raises, `path` stays as it was. `part` sets the temporary path, for callers to whom its name matters;
    it must be on the same file system as `path`.
    """
    part = part or path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a small file and flush it to the disk, so that readers see the old content or the new."""
    # One name for all writers: the next one overwrites what a killed one left.
    with atomic_path(path, part=path.with_name(f".{path.name}.part")) as part, part.open("wb") as f:
        f.write(content.encode() if isinstance(content, str) else content)
        f.flush()
        os.fsync(f.fileno())


def cache_folder(name: str) -> Path:
    """Return a folder of the user's cache, $XDG_CACHE_HOME/eagleray/`name` or ~/.cache/eagleray/`name`.

    All of its content can be recreated, so it is safe to delete.
    """
    return Unix("eagleray").user_cache_path / name  # the same folders on every system


class JsonLines:
    """Appends records to a file such as `metrics.jsonl`, one JSON object per line, in the order of the steps.

    A line that does not fit on a full disk is kept and written together with a later one."""

    def __init__(self, path: Path, *, step: int) -> None:
        """Continue a file after a step; lines of later steps are dropped, because those steps will be repeated."""
        lines = [r for r in read_lines(path) if r["step"] <= step]
        write_atomic(path, "".join(json.dumps(r) + "\n" for r in lines))
        self._path, self._file = path, path.open("ab", buffering=0)
        self._late = b""

    def log(self, record: Mapping[str, Any]) -> None:
        """Append one record."""
        data, size = self._late + json.dumps(record).encode() + b"\n", os.fstat(self._file.fileno()).st_size
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as e:
            os.ftruncate(self._file.fileno(), size)  # no part of a line
            if not self._late:
                log.warning("%s: %s; new lines are kept in memory until there is room", self._path, e.strerror)
            self._late = data
            return
        self._late = b""


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a file with a JSON object on each line, and skip lines that a killed writer left half written."""
    records = []
    # splitlines would also split at other characters, which a text may contain.
    for line in path.read_text(errors="replace").split("\n")[:-1] if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    return records


def append_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Append objects to a file, each on a line of its own, also after a line that was left half written."""
    with path.open("a+b") as f:
        if f.tell():
            f.seek(-1, os.SEEK_END)
            f.write(b"" if f.read(1) == b"\n" else b"\n")
        f.writelines(json.dumps(r, ensure_ascii=False).encode() + b"\n" for r in records)


@contextlib.contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, which is created if it is missing, while the block runs."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def lock_folder(folder: Path, *, patience: float = 0.0) -> IO[str]:
    """Lock a folder until the returned file is closed. Raises UserError when another process still holds the lock after
    `patience` seconds."""
    file = (folder / ".lock").open("a+")
    end = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() >= end:
                file.seek(0)
                with file:
                    raise UserError(f"out={folder}: process {file.read()} is still using this folder") from None
            time.sleep(0.2)
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def is_folder_locked(folder: Path) -> bool:
    """Return whether a process holds the lock of a folder."""
    path = folder / ".lock"
    if not path.exists():
        return False
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
