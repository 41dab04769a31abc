"""Lists the folders of stores that answer in pages, of which each is checked: it is of this folder, and goes on."""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from eagleray.base.errors import UserError
from eagleray.storage.answers import check_blob, understood
from eagleray.storage.blob import Blob
from eagleray.storage.error_classes import Right
from eagleray.storage.retry import PATIENCE, Transient

log = logging.getLogger(__name__)
T = TypeVar("T")
Blobs = list[Blob]  # inside the class `list` is the method
IN_FOLDER = 1_000_000  # most files directly in a folder, as many as a pattern may stand for
IN_TREE = 10_000_000  # most files below a folder
EMPTY = 1000  # pages in a row without a new file, as a store may send where much was deleted
SAID = 30.0  # seconds between two lines about a listing that goes on


@dataclass(frozen=True)
class Page:
    """A part of a listing."""

    blobs: list[Blob]
    folders: list[str]  # the keys of folders, with a slash at their ends
    marker: str  # the next page begins here; empty after the last one


class Listing:
    """The part of a store that lists. `_split`, `_page` and `_call` are the store's own."""

    scheme = ""
    seeks = False  # whether `_page` takes `after`, the key behind which a listing begins

    def _split(self, url: str) -> tuple[str, str]:
        """Return the bucket and the key of a URL."""
        raise NotImplementedError

    def _page(self, bucket: str, prefix: str, delimiter: str, marker: str, after: str = "") -> Page:
        """Ask for a page of the files whose keys begin with `prefix`. With a delimiter, what lies below it is left out,
        and its folder is listed."""
        raise NotImplementedError

    def _call(self, right: Right, url: str, run: Callable[[], T], patience: float) -> T:
        """Repeat a request until it succeeds."""
        raise NotImplementedError

    def list(self, url: str, start: str = "", *, patience: float = PATIENCE) -> Blobs:
        bucket, key = self._split(url)
        pages = list(self._pages(url, bucket, key + start, "/", patience))
        if key and not key.endswith("/") and any(f"{key}/" in page.folders for page in pages):
            return self.list(url + "/", patience=patience)
        blobs = [b for page in pages for b in page.blobs]
        return [b for b in blobs if key.endswith("/") or not key or b.url == url]

    def each(self, url: str) -> Iterator[Blob]:
        """Yield the files directly in a folder; pages are asked for as they are needed."""
        bucket, key = self._split(url.rstrip("/") + "/")
        yield from (b for page in self._pages(url, bucket, key.lstrip("/"), "/", PATIENCE) for b in page.blobs)

    def walk(self, url: str, after: str = "") -> Iterator[Blob]:
        """Yield the files below a folder; of a store that seeks, in the order of their URLs, those behind `after`."""
        bucket, key = self._split(url.rstrip("/") + "/")
        behind = self._split(after)[1] if after else ""
        pages = self._pages(url, bucket, key.lstrip("/"), "", PATIENCE, behind)
        yield from (b for page in pages for b in page.blobs)

    def _pages(
        self, url: str, bucket: str, prefix: str, delimiter: str, patience: float, after: str = ""
    ) -> Iterator[Page]:
        """Yield the pages of a listing. A failure repeats one page only, as there may be thousands.

        Raises UserError where there are more files than anybody lists, and Outage for a listing without an end."""
        root, marker = f"{self.scheme}://{bucket}/", ""
        markers, firsts = set[str](), set[str]()  # the marker and the first key of each page before
        count, empty, began = 0, 0, time.monotonic()
        said, most = began, IN_FOLDER if delimiter else IN_TREE

        def ask() -> Page:
            with understood("a listing"):
                page = self._page(bucket, prefix, delimiter, marker, *[after] * bool(after))
                for name in [check_blob(b).url.removeprefix(root) for b in page.blobs] + page.folders:
                    if not name.startswith(prefix):
                        raise Transient(f"a listing of another folder: it has {name[:200]}")
                    if after and name <= after:
                        raise Transient(f"a listing that should begin behind {after[:200]}, and has {name[:200]}")
                if page.marker in markers or (page.blobs and page.blobs[0].url in firsts) or empty > EMPTY:
                    raise Transient(f"a listing that goes in a circle after {count} files")
            return page

        while True:
            page = self._call("list", url, ask, patience)
            yield page
            count, empty = count + len(page.blobs), 0 if page.blobs else empty + 1
            if not page.marker:
                return
            if count > most:
                raise UserError(f"{url}: more than {most:,} files are listed there")
            marker = page.marker
            markers.add(marker)
            firsts |= {b.url for b in page.blobs[:1]}
            if time.monotonic() > said + SAID and not after:  # else it is one of several
                said = time.monotonic()
                log.warning("%s: %d files are listed after %.0f s, and there are more", url, count, said - began)
