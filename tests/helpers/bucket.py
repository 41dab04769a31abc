"""A bucket that is a folder on this machine, and counts the requests that each rank makes."""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from eagleray.storage.blob import Blob
from eagleray.storage.store import LocalStore


class CountingBucket(LocalStore):
    """Stands in for S3 in `eagleray.storage.store.STORES`. `s3://name/key` is the file `name/key` in its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rank = folder, 0  # the rank that the main thread is at present
        self.ranks: dict[int, int] = {}  # of other threads that are not of rank 0
        self.requests: Counter[int] = Counter()  # by rank
        self.lengths: list[int] = []  # bytes of each read
        self.written: list[int] = []  # bytes of each small file that was stored

    def _path(self, url: str) -> str:
        main = threading.current_thread() is threading.main_thread()
        self.requests[self.rank if main else self.ranks.get(threading.get_ident(), 0)] += 1
        return str(self.folder / url.removeprefix("s3://"))

    def list(self, url: str, start: str = "", *, patience: float = 0.0) -> list[Blob]:
        path = Path(self._path(url))
        blobs = []
        for found in [path] if path.is_file() else sorted(path.iterdir()) if path.is_dir() else []:
            with contextlib.suppress(FileNotFoundError):
                stat = found.stat()
                if found.is_file() and found.name.startswith(start):
                    blobs.append(Blob(f"s3://{found.relative_to(self.folder)}", stat.st_size, f"s3:{stat.st_mtime_ns}"))
        return blobs

    def walk(self, url: str) -> Iterator[Blob]:
        for path in Path(self._path(url)).rglob("*"):
            yield from self.list(f"s3://{path.relative_to(self.folder)}") if path.is_file() else ()

    def tag(self, blob: Blob) -> str:
        return blob.tag

    def read(self, url: str, start: int, length: int, *, tag: str = "", patience: float = 0.0) -> memoryview:
        self.lengths.append(length)
        return super().read(self._path(url), start, length)

    def get(self, url: str) -> bytes:
        try:
            data = Path(self._path(url)).read_bytes()
        except FileNotFoundError:
            raise FileNotFoundError(url) from None
        self.lengths.append(len(data))
        return data

    def put(self, url: str, source: Path, *, patience: float = 0.0) -> None:
        super().put(self._path(url), source)

    def write(self, url: str, data: bytes) -> None:
        super().write(self._path(url), data)
        self.written.append(len(data))

    def create(self, url: str, data: bytes) -> bool:
        return super().create(self._path(url), data)

    def look(self, url: str) -> tuple[bytes, float]:
        return self.get(url), time.time() - Path(self._path(url)).stat().st_mtime

    def delete(self, url: str) -> None:
        super().delete(self._path(url))
