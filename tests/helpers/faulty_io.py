"""Calls to the file system and to a store that fail on demand, and disks that lose what was not flushed.

with FaultyDisk(folder, fail_at=17): the 17th call that changes something in the folder fails as on a full disk
with FaultyDisk(folder, lose_at=17): the process "loses power" there: PowerLoss, and only what was flushed is left
"""

import builtins
import errno
import io
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from helpers.bucket import CountingBucket


class PowerLoss(BaseException):
    """The process ends here; no handler of errors may go on."""


class FaultyDisk:
    """Counts the calls that change a folder: opening for writing, writing, flushing, renaming, deleting, truncating,
    creating folders. The call number `fail_at` fails once, or with `lasting` until the end; after the number `lose_at`
    every call raises PowerLoss."""

    def __init__(self, root: Path, *, fail_at: int = 0, lose_at: int = 0, code: int = errno.ENOSPC, lasting: int = 1):
        self.root, self.fail_at, self.lose_at, self.code, self.lasting = str(root), fail_at, lose_at, code, lasting
        self.calls = 0
        self.names: list[str] = []
        self.flushed: dict[int, bytes] = {}  # by the file's number
        self.listed: dict[str, dict[str, int]] = {}  # by folder: the files of each name, as last flushed
        self.patch = pytest.MonkeyPatch()
        self.handlers: list[logging.Handler] = []

    def __enter__(self) -> "FaultyDisk":
        self.handlers = list(logging.getLogger("eagleray").handlers)
        self.honest = {name: getattr(os, name) for name in ("open", "fsync", "rename", "replace", "unlink", "remove")}
        self.honest |= {name: getattr(os, name) for name in ("mkdir", "ftruncate", "link", "rmdir")}
        for name in ("rename", "replace", "unlink", "remove", "mkdir", "link", "rmdir"):
            self.patch.setattr(os, name, self._named(name))
        self.patch.setattr(os, "fsync", self._fsync)
        self.patch.setattr(os, "ftruncate", self._ftruncate)
        self.open = io.open
        self.patch.setattr(io, "open", self._open)
        self.patch.setattr(builtins, "open", self._open)
        return self

    def __exit__(self, *_: object) -> None:
        self.patch.undo()
        self.fail_at = self.lose_at = 0  # for a file that is still open
        for handler in set(logging.getLogger("eagleray").handlers) - set(self.handlers):  # of a process that lost power
            logging.getLogger("eagleray").removeHandler(handler)

    def count(self, what: str, path: str) -> None:
        """Count a call, which fails if it is its turn."""
        if not path.startswith(self.root):
            return
        self.calls += 1
        self.names.append(f"{what} {path.removeprefix(self.root)}")
        if self.lose_at and self.calls >= self.lose_at:
            raise PowerLoss
        if self.fail_at and self.fail_at <= self.calls < self.fail_at + self.lasting:
            raise OSError(self.code, os.strerror(self.code))

    def _named(self, name: str) -> Any:
        def call(*paths: Any, **options: Any) -> Any:
            self.count(name, os.fspath(paths[-1] if name in ("rename", "replace", "link") else paths[0]))
            return self.honest[name](*paths, **options)

        return call

    def _fsync(self, descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        self.count("fsync", path)
        if not path.startswith(self.root) and path != os.path.dirname(self.root):
            return
        if os.path.isdir(path):
            with os.scandir(path) as entries:
                self.listed[path] = {e.name: e.inode() for e in entries}
        else:
            self.flushed[os.fstat(descriptor).st_ino] = Path(path).read_bytes() if os.path.exists(path) else b""

    def _ftruncate(self, descriptor: int, size: int) -> None:
        self.honest["ftruncate"](descriptor, size)  # what undoes a write is needed even on a full disk

    def _open(self, file: Any, mode: str = "r", buffering: int = -1, *more: Any, **options: Any) -> Any:
        path = os.fspath(file) if isinstance(file, str | os.PathLike) else ""
        if not str(path).startswith(self.root) or not set(mode) & set("wax+"):
            return self.open(file, mode, buffering, *more, **options)
        self.count("open", path)
        known = os.path.exists(path)
        raw = FaultyFile(path, "".join(c for c in mode if c in "rwax+"))
        if not known:  # its number may be that of a file that was deleted
            self.flushed.pop(os.fstat(raw.fileno()).st_ino, None)
        raw.disk, raw.path = self, path
        if buffering == 0:
            return raw
        buffer = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffer if "b" in mode else io.TextIOWrapper(buffer, *more, **options)

    def lose_power(self) -> None:
        """Leave on the disk what was flushed, and nothing else: the names that a folder had when it was flushed, and
        of each file the content that it had when it was."""
        kept: dict[str, bytes] = {}
        for folder, names in self.listed.items():
            for name, inode in names.items():
                path = os.path.join(folder, name)
                if not os.path.isdir(path) and path not in self.listed:  # a folder may have a deleted file's number
                    kept[path] = self.flushed.get(inode, b"")
        for folder, _, names in os.walk(self.root, topdown=False):
            for name in names:
                self.honest["unlink"](os.path.join(folder, name))
        for path, data in kept.items():
            if path.startswith(self.root):
                os.makedirs(os.path.dirname(path), exist_ok=True)
                Path(path).write_bytes(data)


class FaultyFile(io.FileIO):
    """A file whose writes are counted; of the thousands of a checkpoint the first three."""

    disk: FaultyDisk
    path: str
    writes = 0

    def write(self, data: Any) -> int:
        self.writes += 1
        if self.writes <= 3 or not self.path.endswith(".part"):
            self.disk.count("write", self.path)
        return super().write(data)


class FaultyBucket(CountingBucket):
    """A store whose request number `fail_at` raises an error."""

    def __init__(self, folder: Path, *, fail_at: int = 0, error: Exception | None = None) -> None:
        super().__init__(folder)
        self.fail_at, self.error, self.calls = fail_at, error, 0

    def _path(self, url: str) -> str:
        self.calls += 1
        if self.error and self.calls == self.fail_at:
            raise self.error
        return super()._path(url)
