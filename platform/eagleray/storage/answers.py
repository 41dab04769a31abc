"""Checks a store's answers: whether the bytes sent are those requested.

Proxies, caches and restarting servers sometimes answer in place of the store: with a page of their own, another part of
the file, or a missing header. Such answers raise Transient: the request is repeated or, at last, fails with Outage."""

import contextlib
import re
from collections.abc import Iterator, Mapping

from eagleray.base.errors import UserError, one_line
from eagleray.storage.blob import Blob
from eagleray.storage.http_body import whole_number
from eagleray.storage.retry import Transient

LARGEST = 2**50  # bytes; larger than any file of a store
NO_ANSWER = (KeyError, IndexError, ValueError, TypeError, AttributeError, OverflowError)


@contextlib.contextmanager
def understood(what: str) -> Iterator[None]:
    """A context for code that reads an answer. Raises Transient where a field is missing or of the wrong kind."""
    try:
        yield
    except UserError:  # some UserErrors are ValueErrors
        raise
    except NO_ANSWER as e:
        why = f"{one_line(e)} is missing" if isinstance(e, KeyError) else one_line(e)
        raise Transient(f"{what} that cannot be understood: {why[:200]}") from None


def check_blob(blob: Blob) -> Blob:
    """Return a file of a listing. Raises Transient for an impossible size."""
    if not 0 <= blob.size <= LARGEST:
        raise Transient(f"a listing in which {blob.url} has {blob.size} bytes")
    return blob


def part_of(status: int, headers: Mapping[str, str]) -> tuple[int, int, int | None]:
    """Return the positions of a partial answer's first and last byte, and the file's size or, if it is not given, None.

    Raises Transient for an answer that is not partial, or contradicts itself."""
    said = headers.get("Content-Range", "")
    found = re.fullmatch(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)", said.strip())
    if status != 206 or not found:
        raise Transient(f"expected 206 and a part of the file, got {status} and Content-Range {said[:100]!r}")
    first, last, size = int(found[1]), int(found[2]), None if found[3] == "*" else int(found[3])
    if first > last or last >= (LARGEST if size is None else size) or (size or 0) > LARGEST:
        raise Transient(f"Content-Range {said!r} is no part of a file")
    length = headers.get("Content-Length")  # None if the body is sent in chunks
    if length is not None and whole_number(length, most=LARGEST) != last - first + 1:
        raise Transient(f"{length} bytes of Content-Range {said!r}")
    return first, last, size


def check_part(url: str, start: int, length: int, status: int, headers: Mapping[str, str]) -> int | None:
    """Check that an answer has `length` bytes from `start` on. Return the size of the file, or None if unknown.

    Raises UserError when the file ends before these bytes do, and Transient when the answer has other bytes."""
    first, last, size = part_of(status, headers)
    count = last - first + 1
    if first != start or count > length or (count < length and last + 1 != size):
        said = headers.get("Content-Range")
        raise Transient(f"expected bytes {start}-{start + length - 1}, got {said!r}")
    if count < length:
        raise UserError(f"{url}: expected {length} bytes from {start} on, but the file ends after {count} of them")
    return size


def check_file(data: bytes, tag: str) -> bytes:
    """Return `data`, a whole file from a bucket. Raises Transient if the answer names no version (an empty `tag`), like
    the page of a proxy, or if it is an error that S3 sends with a successful status."""
    if not tag:
        raise Transient("an answer that does not name the version of the file")
    if data.lstrip()[:5] == b"<?xml" and b"<Error>" in data[:200]:
        raise Transient(f"an error in place of the file: {data[:200].decode(errors='replace')}")
    return data


def check_tag(expected: str, got: str) -> None:
    """Raises Transient when an answer is about another version of the file than the requested one."""
    if expected and got and got.strip('"') != expected.strip('"'):
        raise Transient(f"asked for version {expected}, got {got[:100]}")
