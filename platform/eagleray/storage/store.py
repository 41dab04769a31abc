"""Bytes of a URL: local paths, file:// and s3://; and the shards that folders, globs and braces stand for."""

import errno
import fnmatch
import itertools
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from braceexpand import braceexpand

from eagleray.base.errors import Outage, UserError
from eagleray.base.files import atomic_path
from eagleray.storage.blob import Blob, new_buffer
from eagleray.storage.retry import PATIENCE, Transient, call_with_retries
from eagleray.storage.s3 import S3Store

T = TypeVar("T")
EDGE = 4096  # bytes at both ends of a local file that tell whether it is still the same
PASSING = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT)  # of a file server that restarts


class Store(Protocol):
    """What the data plane needs of a store of bytes. Every method raises UserError naming the URL, and Outage when the
    store did not answer for `patience` seconds."""

    def list(self, url: str, start: str = "", *, patience: float = PATIENCE) -> list[Blob]:
        """The files directly in a folder whose names begin with `start`, or the one file."""

    def walk(self, url: str) -> Iterator[Blob]:
        """The files in a folder and in all folders below it, in no order."""

    def tag(self, blob: Blob) -> str:
        """Changes when the content does."""

    def read(self, url: str, start: int, length: int, *, tag: str = "", patience: float = PATIENCE) -> memoryview:
        """Exactly `length` bytes from `start`, of the content that had this tag, where the store can tell."""

    def get(self, url: str) -> bytes:
        """The whole file; raises FileNotFoundError when there is none."""

    def put(self, url: str, source: Path, *, patience: float = PATIENCE) -> None:
        """Store a local file; readers see the old content or the new. Raises OSError where nothing can be written."""

    def delete(self, url: str) -> None:
        """Remove a file; no error where there is none."""


class LocalStore:
    def list(self, url: str, start: str = "", *, patience: float = PATIENCE) -> list[Blob]:
        path = local_path(url)

        def run() -> list[Blob]:
            files = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.is_file())
            return [Blob(str(p), p.stat().st_size) for p in files if p.name.startswith(start)]

        return _call_with_retries(url.rstrip("/"), run, patience)

    def walk(self, url: str) -> Iterator[Blob]:
        for place, _, names in os.walk(local_path(url)):
            for name in names:
                path = os.path.join(place, name)
                if os.path.isfile(path):  # no broken link, no socket
                    yield Blob(path, os.path.getsize(path))

    def tag(self, blob: Blob) -> str:
        ends = [_read_bytes(blob.url, at, min(EDGE, blob.size), PATIENCE) for at in (0, max(blob.size - EDGE, 0))]
        return f"crc:{zlib.crc32(ends[1], zlib.crc32(ends[0])):08x}"

    def read(self, url: str, start: int, length: int, *, tag: str = "", patience: float = PATIENCE) -> memoryview:
        return _read_bytes(url, start, length, patience)

    def get(self, url: str) -> bytes:
        return _call_with_retries(url, local_path(url).read_bytes, PATIENCE, absent=FileNotFoundError(url))

    def put(self, url: str, source: Path, *, patience: float = PATIENCE) -> None:
        path = local_path(url)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as part:
            shutil.copyfile(source, part)

    def delete(self, url: str) -> None:
        local_path(url).unlink(missing_ok=True)


def _read_bytes(url: str, start: int, length: int, patience: float) -> memoryview:
    data = new_buffer(length)

    def run() -> int:
        with local_path(url).open("rb", buffering=0) as f:
            f.seek(start)
            at = 0
            while at < length and (got := f.readinto(data[at:])):
                at += got
            return at

    found = _call_with_retries(url, run, patience)
    if found != length:
        raise UserError(f"{url}: {length} bytes expected at {start}, the file ends after {found} of them")
    return data


def _call_with_retries(url: str, run: Callable[[], T], patience: float, *, absent: Exception | None = None) -> T:
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


STORES: dict[str, Store] = {"file": LocalStore(), "s3": S3Store()}  # by the scheme of a URL


def store(url: str) -> Store:
    """Return the store that a URL belongs to. Raises UserError for a scheme that is not known."""
    scheme = url.partition("://")[0] if "://" in url else "file"
    if scheme not in STORES:
        raise UserError(f"{url}: unknown scheme {scheme!r}; known are plain paths, file:// and s3://")
    return STORES[scheme]


def is_remote(url: str) -> bool:
    """Return whether a URL does not name a path of this machine."""
    return "://" in url.removeprefix("file://")


def local_path(url: str) -> Path:
    return Path(url.removeprefix("file://"))


def parent(url: str) -> str:
    return url.rpartition("/")[0]


def absolute(url: str) -> str:
    """The URL with a local path made absolute: a worker's working folder is not the user's."""
    return url if is_remote(url) else os.path.abspath(os.path.expanduser(local_path(url)))


def put_bytes(url: str, data: bytes) -> None:
    with tempfile.NamedTemporaryFile() as f:
        f.write(data)
        f.flush()
        store(url).put(url, Path(f.name))


@dataclass(frozen=True, slots=True)
class Pattern:
    """The files that a URL selects in one folder: a file name, a glob, or every .tar when the name is empty."""

    url: str  # as the user wrote it
    folder: str
    name: str

    @property
    def is_glob(self) -> bool:
        return not self.name or any(c in self.name for c in "*?[")

    def matches(self, name: str) -> bool:
        return name.endswith(".tar") and (
            name == self.name or (self.is_glob and fnmatch.fnmatchcase(name, self.name or "*"))
        )


def patterns(url: str) -> Iterator[Pattern]:
    """What folders, globs and brace patterns mean, folder by folder. Raises UserError."""
    for one in expand_braces(absolute(url)):
        folder, _, name = one.rpartition("/")
        if any(c in folder for c in "*?["):
            raise UserError(f"{url}: a wildcard may stand in the file name only")
        whole = not name.endswith(".tar") and not any(c in name for c in "*?[")
        yield Pattern(url, one.rstrip("/") if whole else folder, "" if whole else name)


def list_shards(urls: str | Sequence[str], *, patience: float = PATIENCE) -> list[Blob]:
    """The tar files that folders, globs and brace patterns stand for, in order of their URLs, each once. A folder is
    listed once, however many of its files are asked for.

    Raises UserError when a pattern matches no tar file, or a file that is named is not there.
    """
    found: dict[str, Blob] = {}
    asked = [p for url in ([urls] if isinstance(urls, str) else urls) for p in patterns(url)]
    for folder, group in itertools.groupby(sorted(asked, key=lambda p: p.folder), key=lambda p: p.folder):
        mine = list(group)
        # Of characters, not of path components: that is what a listing can be narrowed to.
        start = os.path.commonprefix([re.split(r"[*?\[]", p.name)[0] for p in mine])  # noqa: RUF071
        listed = {b.url.rpartition("/")[2]: b for b in _list_folder(folder, start, patience)}
        for p in mine:
            meant = [n for n in listed if p.matches(n)] if p.is_glob else [p.name][: p.name in listed]
            if not meant:
                hint = (
                    "; `eagleray prepare` makes them from images" if p.is_glob and not folder.startswith("s3:") else ""
                )
                what = "no .tar shards there" if p.is_glob else f"no shard {p.folder}/{p.name}"
                raise UserError(f"{p.url}: {what}{hint}")
            found |= {listed[n].url: listed[n] for n in meant}
    if not found:
        raise UserError("no shards are given")
    return [found[url] for url in sorted(found)]


def _list_folder(folder: str, start: str, patience: float) -> list[Blob]:
    """What is in a folder. A place that never answers is a wrong address to somebody who waits for it,
    and an outage to a run that has read from it before."""
    try:
        return store(folder).list(folder + "/", start, patience=patience)
    except Outage as e:
        if patience > PATIENCE:
            raise
        raise UserError(f"{e}; is the address right?") from None


def expand_braces(pattern: str) -> Iterator[str]:
    """Yield every string that `{a,b}` and `{000..012}` in a pattern stand for, as in a shell."""
    try:
        yield from braceexpand(pattern, escape=False)
    except ValueError:  # unbalanced braces are part of a name
        yield pattern
