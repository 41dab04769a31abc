"""Reads answers of HTTP servers into a buffer without copies, and aborts those that are slower than a minimum speed.

The speed is checked where bytes come from the socket, and so for headers, errors and bodies, whichever code reads them.
urllib3's timeout, between two bytes, would never end an answer that comes a few bytes at a time."""

import io
import time
from collections.abc import Mapping
from http.client import HTTPResponse
from typing import Any

from eagleray.base.contexts import on_error
from eagleray.storage.blob import new_buffer
from eagleray.storage.retry import Transient

READ_TIMEOUT = 20  # seconds without a byte after which a transfer is aborted
GRACE = 20.0  # seconds that an answer may take in addition to its time at SLOWEST bytes per second
PROCESSING = 300.0  # the same for a POST: S3 sends spaces while it joins the parts of an upload
SLOWEST = 64 * 2**10  # minimum speed, bytes per second
PIECE = 2**20  # bytes read at a time from a body
MOST = 2**34  # most bytes of a file that is read as a whole
SMALL = 2**26  # most bytes, with the headers, of an answer that is not a file, such as an error or a page of a listing


class Stalled(TimeoutError):
    """The error for an answer that comes too slowly, or does not end."""


class _Floor(io.RawIOBase):
    """Passes on the bytes of a socket. Raises Stalled if they come too slowly while they are read, or are too many."""

    most = float(SMALL)

    def __init__(self, raw: Any, grace: float) -> None:
        self.raw, self.grace, self.count, self.seconds = raw, grace, 0, 0.0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        began = time.monotonic()
        count = int(self.raw.readinto(buffer) or 0)
        self.seconds += time.monotonic() - began
        self.count += count
        if count and self.count < SLOWEST * (self.seconds - self.grace):
            raise Stalled(f"stalled: {self.count} bytes in {self.seconds:.0f} s")
        if self.count > self.most:
            raise Stalled(f"an answer of more than {self.most:.0f} bytes that is no file")
        return count

    def close(self) -> None:
        if not self.closed:
            self.raw.close()
        super().close()


class Answer(HTTPResponse):
    """An answer whose speed is checked while it is read."""

    def __init__(self, sock: Any, debuglevel: int = 0, method: str | None = None, url: str | None = None) -> None:
        super().__init__(sock, debuglevel, method, url)
        grace = PROCESSING if method == "POST" else GRACE
        self._floor = _Floor(self.fp.detach(), grace)  # type: ignore[attr-defined]
        self.fp = io.BufferedReader(self._floor)

    def expect_file(self) -> None:
        """Allow a body of any length."""
        self._floor.most = float("inf")


def with_floor(pools: Mapping[str, Any]) -> dict[str, Any]:
    """Return urllib3's classes of connection pools by scheme, with connections that check the speed of answers."""
    out = {}
    for scheme, pool in pools.items():
        connection = type("Connection", (pool.ConnectionCls,), {"response_class": Answer})
        out[scheme] = type(pool.__name__, (pool,), {"ConnectionCls": connection})
    return out


def read_stream(response: Any, length: int) -> memoryview:
    """Read a body of `length` bytes from a response of urllib3, and release its connection for the next request.

    Raises Transient when the body is shorter, or longer if it is sent in chunks, and Stalled when it is too slow."""
    data, at = new_buffer(length), 0
    stream = response._fp  # the raw response, as its wrappers would copy every byte twice
    stream.expect_file()
    with on_error(response.close):  # no other request may get a connection with unread bytes
        while at < length:
            count = stream.readinto(data[at:])
            if not count:
                raise Transient(f"expected {length} bytes, got {at}")
            at += count
        if not stream.isclosed() and stream.read(1):  # this also reads the end of a body that is sent in chunks
            raise Transient(f"expected {length} bytes, got more")
    response.release_conn()
    return data


def body_of(response: Any) -> bytes:
    """Return the whole body of a response of urllib3. Raises Transient if it is truncated or of unknown length."""
    stream, said = response._fp, response.headers.get("Content-Length")
    stream.expect_file()
    out = bytearray()
    with on_error(response.close):
        if said is None and not stream.chunked and stream.length is None:
            raise Transient("an answer without a length, which may have been cut")
        length = None if said is None else whole_number(said, most=MOST)
        while piece := stream.read(PIECE):  # a wrong Content-Length allocates nothing
            out += piece
            if len(out) > MOST:
                raise Transient(f"an answer of more than {MOST} bytes")
        if length not in (None, len(out)):
            raise Transient(f"expected {length} bytes, got {len(out)}")
    response.release_conn()
    return bytes(out)


def whole_number(said: object, *, most: int) -> int:
    """Return the number of bytes that a server `said`, in a header or in JSON, as an integer. Raises Transient if it is
    not a whole number from 0 to `most`."""
    text = str(said)
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= most):
        raise Transient(f"expected a number of bytes up to {most}, got {text[:40]!r}")
    return int(text)
