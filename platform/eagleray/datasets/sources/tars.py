"""Locate the members of tars, and of tars within tars, by reading their headers only, without unpacking anything."""

import io
import tarfile
from collections.abc import Iterator

from eagleray.base.errors import UserError
from eagleray.storage.range_file import READ, RangeFile, Span

MAGIC = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"PK\x03\x04": "zip"}


class DamagedTar(UserError):
    """The error for a file that is not a tar, or a tar that ends too early."""


def members(tar: Span) -> Iterator[Span]:
    """Yield the files in a tar in their order.

    Raises UserError when the tar is compressed, and DamagedTar when it is damaged or is not a tar at all.
    """
    source = io.BufferedReader(RangeFile(tar, sparse=True), READ)
    kind = next((k for magic, k in MAGIC.items() if source.peek(8).startswith(magic)), None)
    if kind:
        raise UserError(f"{_title(tar)}: compressed with {kind}, so its members cannot be read in place; unpack it")
    count = 0
    try:
        with tarfile.open(fileobj=source, mode="r:") as archive:
            while member := archive.next():
                count += 1
                if member.isfile() and member.offset_data + member.size <= tar.size:
                    yield Span(member.name.removeprefix("./"), tar.url, tar.offset + member.offset_data, member.size)
                archive.members.clear()  # type: ignore[attr-defined]  # tarfile would keep every header
    except tarfile.TarError as e:
        why = f"cut off or damaged after {count} members" if count else f"not a tar archive: {e}"
        raise DamagedTar(f"{_title(tar)}: {why}") from None


def _title(tar: Span) -> str:
    return tar.url if tar.offset == 0 else f"{tar.url}: {tar.name}"
