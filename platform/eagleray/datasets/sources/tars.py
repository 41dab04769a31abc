"""Locate the members of tars, and of tars within tars, by reading only headers, without unpacking anything."""

import io
import zlib
from collections import Counter
from collections.abc import Iterator
from typing import BinaryIO, cast

from eagleray.base.errors import UserError, explained
from eagleray.data import tar_headers
from eagleray.data.file_names import readable
from eagleray.storage import store
from eagleray.storage.range_file import READ, RangeFile, Span

MAGIC = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"PK\x03\x04": "zip"}
SPARSE = "stored sparse, so its bytes are not in one piece"


class DamagedTar(UserError):
    """The error for a file that is not a tar, or for a tar that is cut off or damaged."""


def members(tar: Span) -> Iterator[Span]:
    """Yield the files in a tar in their order.

    Raises UserError when the tar is compressed or a file in it is stored sparse, and DamagedTar when it is damaged or
    not a tar."""
    for span, sparse in members_and_holes(tar):
        if sparse:
            raise UserError(f"{_title(tar)}: {readable(span.name)}: {SPARSE}")
        yield span


def members_and_holes(tar: Span, passed: Counter[str] | None = None) -> Iterator[tuple[Span, bool]]:
    """Yield the files in a tar, each with a flag: true if it is stored sparse, so that the span's bytes are not its
    content. Members that are no files are counted in `passed`. Raises as `members`, except for sparse files."""
    source = io.BufferedReader(RangeFile(tar, sparse=True), READ)
    kind = next((k for magic, k in MAGIC.items() if source.peek(8).startswith(magic)), None)
    if kind:
        raise UserError(f"{_title(tar)}: compressed with {kind}, so its members cannot be read in place; unpack it")
    count = 0
    try:
        for name, offset, size, sparse in tar_headers.members(cast(BinaryIO, source), tar.size, passed):
            count += 1
            if offset + size <= tar.size:
                yield Span(name.removeprefix("./"), tar.url, tar.offset + offset, size), sparse
    except tar_headers.DamagedTar as e:
        why = f"cut off or damaged after {count} members: {e}" if count else f"not a tar archive: {e}"
        raise DamagedTar(f"{_title(tar)}: {why}") from None


def gunzip(url: str, most: int) -> bytes:
    """Return the content of a gzip file. Raises UserError when it is damaged or contains more than `most` bytes."""
    unpacker = zlib.decompressobj(16 + zlib.MAX_WBITS)
    with explained(f"{url}: cannot be unpacked", zlib.error):
        data = unpacker.decompress(bytes(store.store(url).get(url)), most)
    if not unpacker.eof:
        why = f"contains more than {most} bytes" if unpacker.unconsumed_tail else "is cut off"
        raise UserError(f"{url}: cannot be unpacked: it {why}")
    return data


def _title(tar: Span) -> str:
    return tar.url if tar.offset == 0 else f"{tar.url}: {readable(tar.name)}"
