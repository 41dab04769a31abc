"""What the stores have in common that are spoken to over HTTP without a library of their cloud."""

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from eagleray.base.errors import Outage, UserError, one_line
from eagleray.storage import error_classes
from eagleray.storage.allowed import Allowed, Right
from eagleray.storage.answers import check_file, check_part, check_tag
from eagleray.storage.blob import Blob
from eagleray.storage.error_classes import CHANGED, Kind, MissingFile
from eagleray.storage.fork_lock import ForkLock
from eagleray.storage.http_body import READ_TIMEOUT, body_of, read_stream, with_floor
from eagleray.storage.listing import Listing
from eagleray.storage.retry import PATIENCE, Transient, call_with_retries

T = TypeVar("T")
CONNECTIONS = 32
CONNECT_TIMEOUT = 10  # seconds
LINE = 2**16  # bytes of an error's body that are read


class Refused(Exception):
    """An answer that is an error: its status, the service's code for it, and both with its message in one line."""

    def __init__(self, status: int, code: str, line: str, missing: bool) -> None:
        super().__init__(line)
        self.status, self.code, self.line = status, code, line
        self.missing = missing  # whether the file is missing, rather than its bucket


class Pools:
    """Connections to servers, of which every process has its own."""

    def __init__(self) -> None:
        self._lock, self._process, self._pools = ForkLock(), 0, dict[str, Any]()

    def to(self, address: str) -> Any:
        """Return the connections to the server of an address, through the environment's proxy for it if any."""
        from urllib3 import PoolManager, ProxyManager, make_headers

        parts = urlsplit(address)
        proxy = "" if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme, "")
        with self._lock:
            if self._process != os.getpid():
                self._process, self._pools = os.getpid(), {}
            if proxy not in self._pools:
                login = urlsplit(proxy)
                headers = make_headers(
                    proxy_basic_auth=f"{login.username}:{login.password}" if login.password else None
                )
                options: dict[str, Any] = {"maxsize": CONNECTIONS, "headers": {"User-Agent": "eagleray"}}
                manager = ProxyManager(proxy, proxy_headers=headers, **options) if proxy else PoolManager(**options)
                manager.pool_classes_by_scheme = with_floor(manager.pool_classes_by_scheme)
                self._pools[proxy] = manager
            return self._pools[proxy]


class RestStore(Listing):
    """Reads files, lists folders and repeats requests; a store says how its requests look.

    `_open`, `_page`, `_put`, `_upload`, `_delete`, `_tag_said` and `look` are its own."""

    lists = True
    unsigned = ""  # what an error adds when no credentials were found

    def __init__(self) -> None:
        self.pools = Pools()
        self.allowed = Allowed()

    @property
    def anonymous(self) -> bool:
        """Return whether requests are sent without credentials."""
        return True

    def _open(self, url: str, tag: str = "", span: str = "") -> Any:
        """Ask for a file, or the bytes `span` of it, unless its tag has changed."""
        raise NotImplementedError

    def _tag_said(self, headers: Mapping[str, str]) -> str:
        """Return the tag of the file that an answer has bytes of; empty where it does not say."""
        raise NotImplementedError

    def _error(self, status: int, headers: Mapping[str, str], body: bytes) -> Refused:
        """Return the error that an answer says."""
        raise NotImplementedError

    def _renew(self) -> None:
        """Forget the credentials, which the next request reads again."""

    def _split(self, url: str) -> tuple[str, str]:
        return bucket_and_key(url)

    def tag(self, blob: Blob) -> str:
        return blob.tag

    def read(self, url: str, start: int, length: int, *, tag: str = "", patience: float = PATIENCE) -> memoryview:
        if length == 0:
            return memoryview(b"")

        def run() -> memoryview:
            response = self._open(url, tag, f"bytes={start}-{start + length - 1}")
            try:
                check_part(url, start, length, response.status, response.headers)
                check_tag(tag, self._tag_said(response.headers))
            except BaseException:
                response.close()
                raise
            return read_stream(response, length)

        return self._call("read", url, run, patience)

    def get(self, url: str) -> bytes:
        return self._call("read", url, lambda: self._whole(url)[0], PATIENCE)

    def _whole(self, url: str, tag: str = "") -> tuple[bytes, Mapping[str, str]]:
        """Return a file and the headers of the answer. Raises FileNotFoundError when there is none."""
        try:
            response = self._open(url, tag)
        except Refused as e:
            if e.missing:
                raise FileNotFoundError(url) from None
            raise
        data = body_of(response)
        if self.lists:
            said = self._tag_said(response.headers)
            check_tag(tag, said)
            check_file(data, said)
        return data, response.headers

    def put(self, url: str, source: Path, *, patience: float = PATIENCE) -> None:
        try:
            self._put(url, source, patience)
        except UserError as e:
            raise OSError(str(e)) from None

    def _put(self, url: str, source: Path, patience: float) -> None:
        raise NotImplementedError

    def write(self, url: str, data: bytes) -> None:
        try:
            self._call("write", url, lambda: self._upload(url, data), PATIENCE)
        except UserError as e:
            raise OSError(str(e)) from None

    def create(self, url: str, data: bytes) -> bool:
        def run() -> bool:
            try:
                self._upload(url, data, new=True)
            except Refused as e:
                if not self._exists(e):
                    raise
                # An earlier attempt, whose answer was lost, may have made it.
                with contextlib.suppress(FileNotFoundError):
                    return self._whole(url)[0] == data
                return False
            return True

        try:
            return self._call("write", url, run, PATIENCE)
        except UserError as e:
            raise OSError(str(e)) from None

    def delete(self, url: str) -> None:
        def run() -> None:
            try:
                self._delete(url)
            except Refused as e:
                if not e.missing:
                    raise

        self._call("delete", url, run, PATIENCE)

    def _upload(self, url: str, data: bytes, *, new: bool = False) -> None:
        """Send a file in one request; a `new` one must not exist yet."""
        raise NotImplementedError

    def _exists(self, error: Refused) -> bool:
        """Return whether a new file was refused because there is one."""
        return error.status == 412

    def _delete(self, url: str) -> None:
        """Ask to delete a file."""
        raise NotImplementedError

    def _send(
        self,
        method: str,
        address: str,
        *,
        headers: Mapping[str, str],
        body: bytes | None = None,
        expected: Iterable[int] = (200, 201, 202, 204, 206),
    ) -> Any:
        """Send a request, and return the response, whose body has not been read. Raises Refused."""
        from urllib3 import Timeout

        response = self.pools.to(address).request(
            method,
            address,
            body=body,
            headers=dict(headers),
            timeout=Timeout(connect=CONNECT_TIMEOUT, read=READ_TIMEOUT),
            retries=False,
            redirect=False,
            preload_content=False,
            decode_content=False,
        )
        if response.status not in expected:
            text = response.read(LINE)
            response.close()
            raise self._error(response.status, response.headers, text)
        return response

    def _call(self, right: Right, url: str, run: Callable[[], T], patience: float) -> T:
        """Repeat a request until it succeeds; `error_classes` says which errors may pass.

        Raises UserError for what the user has to change, and Outage after `patience` seconds, each with one line."""
        from http.client import HTTPException

        from urllib3.exceptions import HTTPError, LocationValueError, SSLError

        def attempt() -> T:
            try:
                result = run()
            except (FileNotFoundError, UserError, Transient, Outage):
                raise
            except Refused as e:
                self._give_way((right, url), [e.code, e.status], e.line)
                error = MissingFile if e.missing else UserError
                line = e.line + self.unsigned * (self.anonymous and not e.missing)
                raise error(f"{url}: {CHANGED if e.status == 412 else line}") from None
            except LocationValueError as e:
                raise UserError(f"{url}: {one_line(e)}") from None
            except (HTTPError, HTTPException, OSError) as e:
                cause = getattr(e, "reason", e)
                if isinstance(e, SSLError) or isinstance(cause, SSLError):
                    self._give_way((right, url), ["SSLError"], one_line(e))
                    raise UserError(f"{url}: {one_line(e)}") from None
                raise Transient(one_line(e) or type(e).__name__) from None
            self.allowed.add(right, url)
            return result

        return call_with_retries(url, attempt, patience=patience)

    def _give_way(self, what: tuple[Right, str], names: Iterable[str | int], line: str) -> None:
        """Raise Transient for an error that may pass, after forgetting credentials that were refused."""
        kind = error_classes.kind_of(*names)
        if kind is Kind.RENEW and self.anonymous:  # there is nothing to renew
            kind = Kind.DENIED
        if error_classes.passes(kind, allowed_before=self.allowed.has(*what)):
            if kind is not Kind.WAIT:
                self._renew()
            raise Transient(line) from None


def bucket_and_key(url: str) -> tuple[str, str]:
    """Split the URL of an object into bucket and key. Raises UserError when it contains credentials, or no bucket."""
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    if "@" in bucket or ":" in bucket:
        raise UserError(f"{scheme}://: credentials and addresses do not belong in a URL; set them in the environment")
    if not bucket:
        raise UserError(f"{url}: expected {scheme}://BUCKET/...")
    return bucket, key
