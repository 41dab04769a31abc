"""Reads a byte range of a stored file, such as a member of a tar, as a file."""

import io
from typing import Any, NamedTuple

from eagleray.storage import store

READ = 2**20  # bytes per request to an object store, enough for many tar headers
STEP = 4096  # bytes per sparse read of a local file, or of a store after a jump of more than FAR
PATIENCE = 600.0  # seconds of retries, so that hours of work survive a store that is down for a minute
FAR = 4 * READ  # bytes; after a longer jump, a sparse reader requests only STEP bytes


class Span(NamedTuple):
    """A file inside a stored file, such as a member of a tar: its name, the outer file's URL, and its byte range."""

    name: str
    url: str
    offset: int
    size: int


def read_span(span: Span) -> memoryview:
    """Return the bytes of a span. Raises UserError and Outage for failures of the store."""
    return memoryview(store.store(span.url).read(span.url, span.offset, span.size, patience=PATIENCE))


class RangeFile(io.RawIOBase):
    """Reads a span as a seekable stream.

    With `sparse`, for reading headers only, it reads STEP bytes at a time, from a store only after jumps beyond FAR."""

    def __init__(self, span: Span, *, sparse: bool = False) -> None:
        self.span, self.at, self.end = span, 0, 0
        self.sparse, self.local = sparse, not store.is_remote(span.url)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, to: int, whence: int = io.SEEK_SET) -> int:
        self.at = to + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.span.size}[whence]
        return self.at

    def readinto(self, buffer: Any) -> int:
        short = self.sparse and (self.local or abs(self.at - self.end) > FAR)
        length = max(min(len(buffer), STEP if short else len(buffer), self.span.size - self.at), 0)
        buffer[:length] = read_span(self.span._replace(offset=self.span.offset + self.at, size=length))
        self.at += length
        self.end = self.at
        return length
