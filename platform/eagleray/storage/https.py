"""Reads https:// and http:// URLs from any server that supports the header Range (RFC 9110, section 14).

Files can neither be listed nor written there."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote, urljoin, urlsplit

from eagleray.base.errors import UserError, has_secrets, hide_secrets
from eagleray.storage.answers import check_blob, check_part, understood
from eagleray.storage.blob import Blob
from eagleray.storage.error_classes import CHANGED
from eagleray.storage.listing import Blobs
from eagleray.storage.remote import Refused
from eagleray.storage.rest import RestStore
from eagleray.storage.retry import PATIENCE, Transient

REDIRECTS = 5
MOVED = (301, 302, 303, 307, 308)


class ReadOnly(OSError, UserError):
    """The error for writing to a store that can only be read."""


class HttpsStore(RestStore):
    """Reads files from web servers. As servers list nothing, URLs must name every shard, by braces or one by one."""

    scheme, lists = "https", False

    def list(self, url: str, start: str = "", *, patience: float = PATIENCE) -> Blobs:
        """Return the one file that a URL names. Its size is learned by requesting its first byte."""
        if url.endswith("/") and not start:
            raise UserError(f"{url}: {NO_LISTING}")

        def run() -> Blobs:
            try:
                response = self._open(url + start, span="bytes=0-0")
            except Refused as e:
                if e.missing:
                    return []
                if e.status == 416 and e.code == "bytes */0":  # an empty file, without a first byte
                    return [Blob(url + start, 0)]
                raise
            with contextlib.closing(response):
                size = check_part(url + start, 0, 1, response.status, response.headers)
                if size is None:
                    raise UserError(f"{url + start}: the server does not say the size of the file")
                return [check_blob(Blob(url + start, size, tag_of(response.headers)))]

        return self._call("list", url, run, patience)

    def each(self, url: str) -> Iterator[Blob]:
        raise UserError(f"{url}: {NO_LISTING}")

    def walk(self, url: str, after: str = "") -> Iterator[Blob]:
        raise UserError(f"{url}: {NO_LISTING}")

    def look(self, url: str) -> NoReturn:
        raise read_only(url)

    def put(self, url: str, source: Path, *, patience: float = PATIENCE) -> None:
        raise read_only(url)

    def write(self, url: str, data: bytes) -> None:
        raise read_only(url)

    def create(self, url: str, data: bytes) -> bool:
        raise read_only(url)

    def delete(self, url: str) -> None:
        raise read_only(url)

    def _open(self, url: str, tag: str = "", span: str = "") -> Any:
        etag = tag.removeprefix("https:")
        headers = {"Range": span} if span else {}
        if etag.startswith('"'):  # a weak ETag, W/"...", never matches
            headers["If-Match"] = etag
        response = self._follow(address(url), headers)
        got = tag_of(response.headers)
        problem: Exception | None = None
        if is_page(response.headers) and not url.endswith((".html", ".htm")):
            problem = Transient(f"a page for a browser in place of the file (status {response.status})")
        elif span and response.status == 200 and not tag and not self.allowed.has("read", url):
            # If the server has sent a part before, as `tag` or `allowed` shows, `check_part` raises Transient for 200.
            problem = UserError(
                f"{url}: the server ignores Range (it answered 200); expected 206 and a part of the file"
            )
        elif tag and etag.startswith(('"', "W/")) and "ETag" not in response.headers:
            problem = Transient("an answer without the ETag that the file had before")
        elif tag and got != tag and not (span and response.status == 200):
            problem = UserError(f"{url}: {CHANGED}")  # compared here, as many servers ignore If-Match
        if problem:
            response.close()
            raise problem
        return response

    def _follow(self, address: str, headers: Mapping[str, str]) -> Any:
        """Request a file, and follow redirections. Raises Transient for a redirection that cannot be trusted: over
        plain HTTP anybody may name another host."""
        for _ in range(REDIRECTS + 1):
            response = self._send("GET", address, headers=headers, expected=(200, 206, *MOVED))
            if response.status not in MOVED:
                return response
            response.close()
            with understood("a redirection"):
                target = urljoin(address, response.headers["Location"])
                old, new = urlsplit(address), urlsplit(target)
                secure = new.scheme == "https" and (old.scheme == "https" or new.hostname == old.hostname)
            if not new.hostname or not (secure or (old.scheme, old.netloc) == (new.scheme, new.netloc)):
                raise Transient(f"redirected to {hide_secrets(target)[:200]}, which cannot be trusted")
            if (old.scheme, old.netloc) != (new.scheme, new.netloc):  # another server must not get the token
                headers = {name: value for name, value in headers.items() if name.lower() != "authorization"}
            address = target
        raise Transient(f"redirected more than {REDIRECTS} times")

    def _tag_said(self, headers: Mapping[str, str]) -> str:
        return ""  # `_open` has compared the tags

    def _error(self, status: int, headers: Mapping[str, str], body: bytes) -> Refused:
        from http.client import responses

        code = headers.get("Content-Range", "") if status == 416 else ""
        # A public bucket whose files may be read but not listed answers 403 for a missing file.
        missing = status in (403, 404, 410)
        return Refused(status, code, f"{status} {responses.get(status, '')}".strip(), missing)


NO_LISTING = "a web server has no listing; expected the names of files, such as https://HOST/x-{000..127}.tar"


def tag_of(headers: Mapping[str, str]) -> str:
    """Return a file's ETag, with its quotes, or else the time of its last change; "" if the server sends neither."""
    known = headers.get("ETag") or headers.get("Last-Modified")
    return f"https:{known}" if known else ""


def is_page(headers: Mapping[str, str]) -> bool:
    """Return whether an answer is a page for a browser, such as a login page."""
    return headers.get("Content-Type", "").strip().lower().startswith("text/html")


def address(url: str) -> str:
    """Return the URL with its path percent-encoded. Raises UserError when it has no host, or contains credentials."""
    parts = urlsplit(url)
    if "@" in parts.netloc or has_secrets(url):
        raise UserError(f"{parts.scheme}://{parts.hostname}: credentials do not belong in a URL")
    if not parts.hostname:
        raise UserError(f"{url}: expected {parts.scheme}://HOST/...")
    host = f"{parts.scheme}://{parts.netloc}"
    return host + quote(url.removeprefix(host), safe="/%~:+,=@&")


def read_only(url: str) -> ReadOnly:
    """Return the error for writing to a web server."""
    return ReadOnly(f"{url}: a web server can only be read; expected a folder, or an s3://, gs:// or az:// URL")
