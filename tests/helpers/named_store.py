"""A store of which only names are known: it lists them from anywhere, in order, and counts who asks."""

import bisect
import threading
from collections.abc import Iterator, Sequence

from eagleray.storage.blob import Blob
from eagleray.storage.store import LocalStore

PAGE = 1000  # names of a page, each of which is a request


class NamedStore(LocalStore):
    """Stands in for S3 in `eagleray.storage.store.STORES`; the files are `names`, sorted, in one bucket."""

    seeks = True

    def __init__(self, names: Sequence[str], *, width: int = 0) -> None:
        """With `width`, a page waits until so many listings want one, as if each took long."""
        self.names, self.pages, self.lock = names, 0, threading.Lock()
        self.together = threading.Barrier(width) if width else None

    def walk(self, url: str, after: str = "") -> Iterator[Blob]:
        root = "/".join(url.split("/")[:3]) + "/"
        at = bisect.bisect_right(self.names, after.removeprefix(root)) if after else 0
        while True:
            with self.lock:
                self.pages += 1
            if self.together:
                try:
                    self.together.wait(0.02)
                except threading.BrokenBarrierError:
                    self.together.reset()
            for n in range(at, min(at + PAGE, len(self.names))):
                yield Blob(root + self.names[n], 7, f"s3:{n}")
            at += PAGE
            if at >= len(self.names):
                return

    def each(self, url: str) -> Iterator[Blob]:
        return (blob for blob in self.walk(url) if blob.url.count("/") == 3)


class Numbers(Sequence[str]):
    """The names of so many images, which are made when they are asked for."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, n: int) -> str:  # type: ignore[override]
        if n >= self.count:
            raise IndexError(n)
        return f"{n // 1000:07d}/{n % 1000:03d}.jpg"
