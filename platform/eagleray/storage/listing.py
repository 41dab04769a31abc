"""Lists folders of stores that answer in pages. A page of another folder, or one that was sent before, is refused."""

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
Blobs = list[Blob]  # an alias, because inside the class `list` is the method
IN_FOLDER = 1_000_000  # most files directly in a folder; equal to NAMES of `url_patterns`
IN_TREE = 10_000_000  # most files in a folder and below it
EMPTY = 1000  # most pages in a row without a file, which stores may send where many files were deleted
SAID = 30.0  # seconds between log lines about a long listing


@dataclass(frozen=True)
class Page:
    """One page of a listing."""

    blobs: list[Blob]
    folders: list[str]  # keys of folders, which end in a slash
    marker: str  # token with which the next page is requested; empty in the last page


class Listing:
    """Methods for listing, inherited by stores, which define `_split`, `_page` and `_call`."""

    scheme = ""
    seeks = False  # whether `_page` can begin after the key `after`

    def _split(self, url: str) -> tuple[str, str]:
        """Return the bucket and the key of a URL."""
        raise NotImplementedError

    def _page(self, bucket: str, prefix: str, delimiter: str, marker: str, after: str = "") -> Page:
        """Request a page of the files whose keys begin with `prefix`: the first or, with the `marker` of a page, the
        next. With a delimiter, subfolders come in place of the files in them. For `after`, see `seeks`."""
        raise NotImplementedError

    def _call(self, right: Right, url: str, run: Callable[[], T], patience: float) -> T:
        """Repeat the request `run` until it succeeds. It needs the right `right` for `url`."""
        raise NotImplementedError

    def list(self, url: str, start: str = "", *, patience: float = PATIENCE) -> Blobs:
        bucket, key = self._split(url)
        pages = list(self._pages(url, bucket, key + start, "/", patience))
        if key and not key.endswith("/") and any(f"{key}/" in page.folders for page in pages):
            return self.list(url + "/", patience=patience)
        blobs = [b for page in pages for b in page.blobs]
        return [b for b in blobs if key.endswith("/") or not key or b.url == url]

    def each(self, url: str) -> Iterator[Blob]:
        """Yield the files directly in a folder. Pages are requested as needed."""
        bucket, key = self._split(url.rstrip("/") + "/")
        yield from (b for page in self._pages(url, bucket, key.lstrip("/"), "/", PATIENCE) for b in page.blobs)

    def walk(self, url: str, after: str = "") -> Iterator[Blob]:
        """Yield the files in a folder and all folders below it. If the store `seeks`, they come in the order of their
        URLs, and only those after the URL `after`."""
        bucket, key = self._split(url.rstrip("/") + "/")
        behind = self._split(after)[1] if after else ""
        pages = self._pages(url, bucket, key.lstrip("/"), "", PATIENCE, behind)
        yield from (b for page in pages for b in page.blobs)

    def _pages(
        self, url: str, bucket: str, prefix: str, delimiter: str, patience: float, after: str = ""
    ) -> Iterator[Page]:
        """Yield the pages of a listing. As there may be thousands, only the page that failed is requested again.

        Raises UserError for more files than IN_FOLDER or IN_TREE, and Outage for a listing that repeats itself."""
        root, marker = f"{self.scheme}://{bucket}/", ""
        markers, firsts = set[str](), set[str]()  # markers and first URLs of the pages so far
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
            if time.monotonic() > said + SAID and not after:  # concurrent listings, which have `after`, say nothing
                said = time.monotonic()
                log.warning("%s: %d files are listed after %.0f s, and there are more", url, count, said - began)
