"""Stamps of local files, which change when a file is written, and this machine's record of files by their stamps."""

import contextlib
import hashlib
import os
import time
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from eagleray.base.errors import explained
from eagleray.base.files import cache_folder, write_atomic
from eagleray.storage import store

TICK = 0.02  # seconds after which a file that is written again has another time, on any file system


class Stamp(NamedTuple):
    """A file's mtime and ctime in nanoseconds and its inode number, which show whether the file was written since. For
    many files together, each field is a digest of the files' values."""

    written: int
    changed: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> "Stamp":
        return cls(status.st_mtime_ns, status.st_ctime_ns, status.st_ino)

    def fits(self, before: Sequence[int]) -> bool:
        """Return whether a file was not written since it had the stamp `before`, or is a copy of that file with the
        same mtime. If a program has written the file and reset its mtime, the ctime differs."""
        if len(before) != len(self):
            return False
        then = Stamp(*before)
        return self.written == then.written and (self.changed == then.changed or self.inode != then.inode)


def stamps(urls: Iterable[str]) -> dict[str, Stamp]:
    """Return the stamp of each local file, by its name. Raises UserError when one cannot be read."""
    found = {url.rpartition("/")[2]: _stamp(url) for url in urls}
    settle(found.values())
    return found


def settle(stamps: Iterable[Stamp]) -> None:
    """Wait until files with these stamps would get other stamps if they were written again."""
    if 0 <= time.time_ns() - max((stamp.changed for stamp in stamps), default=0) < TICK * 1e9:
        time.sleep(TICK)


def short(*parts: Hashable) -> int:
    """Return a 63-bit digest of some values."""
    text = repr(parts).encode(errors="surrogateescape")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1


class Verified:
    """Remembers on this machine which files had the indexed content at which stamps, as digests by `short`."""

    def __init__(self, folder: str | None) -> None:
        self.marks = set[int]()
        if folder is not None:
            digest = hashlib.sha256(folder.encode(errors="surrogateescape")).hexdigest()
            self.path = cache_folder("verified") / digest[:24]
            with contextlib.suppress(OSError):
                data = self.path.read_bytes()
                self.marks = set(np.frombuffer(data[: len(data) // 8 * 8], "<i8").tolist())

    def __contains__(self, mark: int) -> bool:
        return mark in self.marks

    def add(self, marks: Iterable[int]) -> None:
        """Add digests. If the cache cannot be written, the files they stand for are read again at the next start."""
        if not (new := set(marks) - self.marks):
            return
        self.marks |= new
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self.path, np.array(sorted(self.marks), "<i8").tobytes())


def _stamp(url: str) -> Stamp:
    with explained(f"{url}: cannot be read", OSError):
        return Stamp.of(store.local_path(url).stat())
