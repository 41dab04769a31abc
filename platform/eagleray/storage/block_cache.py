"""Caches blocks on a machine's disk for all of its processes, and deletes the least recently used blocks first.

A file gets its name only when it is complete. The kernel releases the locks of a process that ends, so a killed process
leaves nothing but a partial file, which the next writer of the block overwrites."""

import contextlib
import hashlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from eagleray.base.files import atomic_path, file_lock, writing
from eagleray.storage.blob import Blob, new_buffer

log = logging.getLogger(__name__)
STRIPES = 64  # number of lock files that all blocks share
FREED_SHARE = 0.05  # smallest share of the limit that an eviction frees, so that it is rare: it lists all files
WAIT = 30.0  # seconds to wait for a fetch of the same stripe, which may last as long as an outage of the store
STALE = 600  # seconds after which a partial file counts as abandoned


class Cache:
    """A folder of cached blocks with a limited size."""

    def __init__(self, folder: Path, limit: int) -> None:
        """`limit` is the largest size in bytes. Raises UserError when the folder cannot be written."""
        self.folder, self.limit = folder, limit
        with writing(f"data.cache={folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "used").touch()

    def __contains__(self, block: tuple[Blob, int, int]) -> bool:
        return self._path(*block).exists()

    def get(self, blob: Blob, begin: int, end: int, fetch: Callable[[], memoryview]) -> memoryview:
        """Return a shard's bytes from `begin` to `end`. If they are not cached, one process of the machine fetches."""
        path = self._path(blob, begin, end)
        data = _read(path, end - begin)
        if data is None:
            with contextlib.ExitStack() as locks:
                try:
                    lock = self.folder / f"lock-{int(path.name[:8], 16) % STRIPES:02d}"
                    locks.enter_context(file_lock(lock, patience=WAIT))
                except OSError as e:  # the folder may have been deleted, or the disk may be full
                    log.warning("%s: cannot be locked: %s", self.folder, e.strerror)
                data = _read(path, end - begin)
                if data is None:
                    data = fetch()
                    self._write(path, data)
        return data

    def drop(self, blob: Blob, begin: int, end: int) -> None:
        """Delete a block whose bytes are wrong."""
        try:
            self._path(blob, begin, end).unlink(missing_ok=True)
        except OSError as e:  # the disk may have become read-only; the checksum shows the damage at each use
            log.warning("%s: cannot delete a damaged block: %s", self.folder, e.strerror)

    def _path(self, blob: Blob, begin: int, end: int) -> Path:
        about = os.fsencode(f"{blob.url} {blob.tag} {blob.size} {begin} {end}")
        name = hashlib.sha256(about).hexdigest()[:32]
        return self.folder / f"{name}.block"

    def _write(self, path: Path, data: memoryview) -> None:
        if len(data) > self.limit:
            return
        try:  # nothing is flushed, as the checksum of every image shows what a power loss damages
            with contextlib.ExitStack() as locks, atomic_path(path, part=path.with_suffix(".part")) as part:
                part.write_bytes(data)
                locks.enter_context(file_lock(self.folder / "lock"))  # held until the block has its name
                self._make_room(len(data))
        except OSError as e:  # a full disk makes the run slower, but must not end it
            log.warning("%s: cannot cache a block: %s", self.folder, e.strerror)

    def _make_room(self, size: int) -> None:
        """Delete the least recently used blocks if needed, and add `size` to the count of used bytes.

        A killed process may leave the count too high, never too low. It is corrected when it reaches the limit."""
        text = (self.folder / "used").read_text()
        used = int(text) if text.isdigit() else self.limit
        if used + size > self.limit:
            used = self._evict(int(self.limit * (1 - FREED_SHARE)) - size)
        (self.folder / "used").write_text(str(used + size))

    def _evict(self, target: int) -> int:
        """Delete the least recently used blocks until at most `target` bytes remain, and return the remaining bytes."""
        files = []
        for entry in os.scandir(self.folder):
            with contextlib.suppress(FileNotFoundError):
                stat = entry.stat()
                abandoned = entry.name.endswith(".part") and time.time() - stat.st_mtime > STALE
                if abandoned or entry.name.endswith(".block"):
                    files.append((stat.st_mtime, stat.st_size, entry.path))
        used = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if used <= max(target, 0):
                break
            Path(path).unlink(missing_ok=True)
            used -= size
        return used


def _read(path: Path, length: int) -> memoryview | None:
    """Return the content of a block and mark it as used, or None if it is missing or has another length."""
    try:
        with path.open("rb", buffering=0) as file:
            if os.fstat(file.fileno()).st_size != length:
                return None
            os.utime(file.fileno())
            data, at = new_buffer(length), 0
            while at < length and (count := file.readinto(data[at:])):
                at += count
    except OSError:
        return None
    return data if at == length else None
