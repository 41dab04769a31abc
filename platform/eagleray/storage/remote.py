"""The base class of all stores over HTTP. It reads, writes, and retries requests that fail temporarily."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, TypeVar

from eagleray.base.contexts import on_error
from eagleray.base.errors import Outage, UserError, one_line
from eagleray.storage import error_classes
from eagleray.storage.answers import check_file, check_part, check_tag, understood
from eagleray.storage.blob import Blob
from eagleray.storage.error_classes import CHANGED, Allowed, Kind, MissingFile, Right
from eagleray.storage.http_body import body_of, read_stream
from eagleray.storage.listing import Listing
from eagleray.storage.retry import PATIENCE, Transient, call_with_retries

T = TypeVar("T")


class Refused(Exception):
    """An error answer of a service: its HTTP status, the service's error code, and a line with both and the message."""

    def __init__(self, status: int, code: str, line: str, missing: bool, *names: str, sender: Any = None) -> None:
        """`names` are the names by which the error is classified, by default its code and status. `sender` is the
        client that has sent the request."""
        super().__init__(line)
        self.status, self.code, self.line, self.sender = status, code, line, sender
        self.missing = missing  # whether the file, but not its bucket, is missing
        self.names = names or (code, status)


class RemoteStore(Listing):
    """Reads and writes files, lists folders and retries requests. Subclasses form the requests.

    A subclass has `_open`, `_page`, `_put`, `_upload`, `_delete` and `_tag_said`, which raise Refused and Transient."""

    lists = True
    unsigned = ""  # hint at the end of an error if no credentials were found

    def __init__(self) -> None:
        self.allowed = Allowed()

    @property
    def anonymous(self) -> bool:
        """Return whether requests are sent without credentials."""
        return True

    def _open(self, url: str, tag: str = "", span: str = "") -> Any:
        """Request a file, or only its bytes `span`, in the form of the header Range. With `tag`, a file with another
        tag is refused. Returns urllib3's response with an unread body."""
        raise NotImplementedError

    def _tag_said(self, headers: Mapping[str, str]) -> str:
        """Return the tag of the file that an answer is about, or an empty text if the answer has none."""
        raise NotImplementedError

    def _put(self, url: str, source: Path, patience: float) -> None:
        """Upload a local file."""
        raise NotImplementedError

    def _upload(self, url: str, data: bytes, *, new: bool = False) -> None:
        """Upload a file in one request. If `new`, the file must not exist yet."""
        raise NotImplementedError

    def _exists(self, error: Refused) -> bool:
        """Return whether a new file was refused because it exists already."""
        return error.status == 412

    def _delete(self, url: str) -> None:
        """Request the deletion of a file."""
        raise NotImplementedError

    def _renew(self, sender: Any) -> None:
        """Drop the credentials with which a refused request was sent. The next request reads them again."""

    def _split(self, url: str) -> tuple[str, str]:
        return bucket_and_key(url)

    def tag(self, blob: Blob) -> str:
        return blob.tag

    def read(self, url: str, start: int, length: int, *, tag: str = "", patience: float = PATIENCE) -> memoryview:
        if length == 0:
            return memoryview(b"")
        tag = tag if tag.startswith(f"{self.scheme}:") else ""  # tags of other stores cannot be compared

        def run() -> memoryview:
            response = self._open(url, tag, f"bytes={start}-{start + length - 1}")
            with on_error(response.close):
                check_part(url, start, length, response.status, response.headers)
                check_tag(tag, self._tag_said(response.headers))
                return read_stream(response, length)

        return self._call("read", url, run, patience)

    def get(self, url: str) -> bytes:
        return self._call("read", url, lambda: self._whole(url)[0], PATIENCE)

    def look(self, url: str) -> tuple[bytes, float]:
        def run() -> tuple[bytes, float]:
            data, headers = self._whole(url)
            with understood("the age of a file"):
                now, written = (parsedate_to_datetime(headers[name]) for name in ("Date", "Last-Modified"))
                return data, (now - written).total_seconds()

        return self._call("read", url, run, PATIENCE)

    def _whole(self, url: str, tag: str = "") -> tuple[bytes, Mapping[str, str]]:
        """Return a file and the headers of the answer. Raises FileNotFoundError when the file does not exist."""
        with _missing(FileNotFoundError(url)):
            response = self._open(url, tag)
        data = body_of(response)
        if self.lists:
            said = self._tag_said(response.headers)
            check_tag(tag, said)
            check_file(data, said)
        return data, response.headers

    def put(self, url: str, source: Path, *, patience: float = PATIENCE) -> None:
        with _writing():
            self._put(url, source, patience)

    def write(self, url: str, data: bytes) -> None:
        with _writing():
            self._call("write", url, lambda: self._upload(url, data), PATIENCE)

    def create(self, url: str, data: bytes) -> bool:
        def run() -> bool:
            try:
                self._upload(url, data, new=True)
            except Refused as e:
                if not self._exists(e):
                    raise
                # An earlier attempt, whose answer was lost, may have created the file.
                with contextlib.suppress(FileNotFoundError):
                    return self._whole(url)[0] == data
                return False
            return True

        with _writing():
            return self._call("write", url, run, PATIENCE)

    def delete(self, url: str) -> None:
        def run() -> None:
            with contextlib.suppress(FileNotFoundError), _missing(FileNotFoundError(url)):
                self._delete(url)

        self._call("delete", url, run, PATIENCE)

    def _call(self, right: Right, url: str, run: Callable[[], T], patience: float) -> T:
        """Repeat the request `run` while its errors are temporary, as `error_classes` decides.

        Raises, each with one line, UserError for what the user has to change, and Outage after `patience` seconds."""
        from http.client import HTTPException

        from urllib3.exceptions import HTTPError, LocationValueError, SSLError

        def attempt() -> T:
            try:
                result = run()
            except (FileNotFoundError, UserError, Transient, Outage):
                raise
            except Refused as e:
                raise self._lasting(right, url, e) from None
            except LocationValueError as e:
                raise UserError(f"{url}: {one_line(e)}") from None
            except (HTTPError, HTTPException, OSError) as e:
                line = one_line(e) or type(e).__name__
                if isinstance(e, SSLError) or isinstance(getattr(e, "reason", None), SSLError):
                    raise self._lasting(right, url, Refused(0, "", line, False, "SSLError")) from None
                raise Transient(line) from None
            self.allowed.add(right, url)
            return result

        return call_with_retries(url, attempt, patience=patience)

    def _given_up(self, url: str, abort: Callable[[], object]) -> contextlib.AbstractContextManager[None]:
        """A context for an upload in parts. After an error, `abort` tells the store to discard the parts, as they cost
        money."""

        def undo() -> None:
            with contextlib.suppress(UserError, Outage):
                self._call("write", url, abort, 0)

        return on_error(undo)

    def _lasting(self, right: Right, url: str, error: Refused) -> UserError:
        """Return the UserError for a lasting error. Raises Transient for a temporary one, after dropping the
        credentials if they were refused."""
        kind = error_classes.kind_of(*error.names)
        if kind is Kind.RENEW and self.anonymous:  # there are no credentials to renew
            kind = Kind.DENIED
        if error_classes.passes(kind, allowed_before=self.allowed.has(right, url)):
            if kind is not Kind.WAIT:
                self._renew(error.sender)
            raise Transient(error.line) from None
        if error.missing:
            return MissingFile(f"{url}: {error.line}")
        changed = error.status == 412 and right == "read"  # Swift also answers 412 to a listing without credentials
        return UserError(f"{url}: {CHANGED if changed else error.line + self.unsigned * self.anonymous}")


@contextlib.contextmanager
def _missing(absent: FileNotFoundError) -> Iterator[None]:
    """A context that raises `absent` instead of a Refused that says that a file is missing."""
    try:
        yield
    except Refused as e:
        raise (absent if e.missing else e) from None


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    """A context that raises a UserError as an OSError, which writing to a disk would raise."""
    try:
        yield
    except UserError as e:
        raise OSError(str(e)) from None


def bucket_and_key(url: str) -> tuple[str, str]:
    """Split the URL of an object into bucket and key. Raises UserError when it contains credentials, or no bucket."""
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    if "@" in bucket or ":" in bucket:  # in USER:KEY@HOST, a slash in KEY ends `bucket` before the @
        raise UserError(f"{scheme}://: credentials do not belong in a URL, nor addresses; set them in the environment")
    if not bucket:
        raise UserError(f"{url}: expected {scheme}://BUCKET/...")
    return bucket, key
