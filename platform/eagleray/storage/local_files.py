"""Reads local paths, with retries while the server of a network file system restarts, and lists folders recursively."""

import errno
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from eagleray.base.errors import UserError
from eagleray.storage.retry import PATIENCE, Transient, call_with_retries

T = TypeVar("T")
Inode = tuple[int, int]  # device number and inode number of a file
PASSING = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT)  # errors while the server of a network file system restarts


def ask_disk(url: str, run: Callable[[], T], patience: float, *, absent: Exception | None = None) -> T:
    """Return the result of `run`, repeated while it fails with an error in PASSING. Raises `absent`, if given, when the
    file does not exist, UserError for other errors of the disk, and Outage after `patience` seconds."""

    def attempt() -> T:
        try:
            return run()
        except OSError as e:
            if absent and isinstance(e, FileNotFoundError):
                raise absent from None
            if e.errno in PASSING:
                raise Transient(e.strerror or str(e)) from None
            raise UserError(f"{url}: cannot be read: {e.strerror}") from None

    return call_with_retries(url, attempt, patience=patience)


def files_below(root: Path, *, hidden: bool = True) -> Iterator[str]:
    """Yield the relative paths of all files in a local folder and below it, in no order. A missing folder has none.

    Links to folders are followed, except to a folder that contains the link. Without `hidden`, names that begin with a
    dot are left out. Raises UserError when a folder cannot be listed, and Outage like `ask_disk`."""
    todo: list[tuple[str, tuple[Inode, ...]]] = [("", ())]  # folders, each with the inodes of those above it
    while todo:
        below, above = todo.pop()
        inode, found = ask_disk(str(root / below), functools.partial(_scan, root / below), PATIENCE)
        if inode in above:
            continue
        for name, is_folder in found:
            if not hidden and name.startswith("."):
                continue
            if is_folder:
                todo.append((f"{below}{name}/", (*above, inode)))
            else:
                yield below + name


def _scan(folder: Path) -> tuple[Inode, list[tuple[str, bool]]]:
    """Return the inode of a folder, and for each name in it whether it is a folder. A missing folder has no names."""
    try:
        status = folder.stat()
        with os.scandir(folder) as entries:
            return (status.st_dev, status.st_ino), [(entry.name, _is_folder(entry)) for entry in entries]
    except (FileNotFoundError, NotADirectoryError):
        return (0, 0), []


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError as e:
        if e.errno in PASSING:
            raise
        return False  # it is a broken link
