"""Lists the samples of a tar shard in one pass over its bytes: positions, labels and checksums."""

import functools
import io
import itertools
import re
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from PIL import Image

from eagleray.storage.blob import Blob
from eagleray.storage.range_file import RangeFile, Span

READ = 4 * 2**20  # bytes per request


@dataclass(frozen=True, slots=True)
class Row:
    """One sample of a shard. With an empty key, the row describes a fault of the shard itself."""

    key: str = ""
    offset: int = -1
    size: int = 0
    label: int = -1
    crc: int | None = None
    reason: str | None = None


@functools.cache
def image_extensions() -> frozenset[str]:
    """Return the file extensions, without the dot, of all image formats that PIL reads."""
    return frozenset(e[1:] for e, kind in Image.registered_extensions().items() if kind in Image.OPEN)


def scan(blob: Blob) -> Iterator[Row]:
    """Yield the samples of one tar, grouped by key as webdataset does. A broken sample's `reason` says what is
    wrong."""
    samples = 0
    try:
        source: Any = io.BufferedReader(RangeFile(Span("", blob.url, 0, blob.size)), READ)
        with tarfile.open(fileobj=source, mode="r:") as tar:
            for key, members in itertools.groupby(_files(tar, blob, source), key=lambda m: m[0]):
                samples += 1
                yield _row(key, [m for _, m in members], blob)
            rest = blob.size - tar.offset
            source.seek(tar.offset)
            if rest > 0 and source.read(512).strip(b"\0"):
                yield Row(offset=tar.offset, reason=f"the shard is cut off or damaged after {samples} samples")
            elif samples == 0:
                yield Row(reason="the shard holds no samples")
    except tarfile.TarError as e:
        yield Row(reason=f"not a tar archive: {e}" if blob.size else "the file is empty")


@dataclass(frozen=True, slots=True)
class _Member:
    extension: str
    offset: int
    size: int
    data: bytes  # of an image or a label


def _files(tar: tarfile.TarFile, blob: Blob, source: Any) -> Iterator[tuple[str, _Member]]:
    """Yield the key and the member of every file, up to the first whose bytes are cut off."""
    while member := tar.next():
        parts = re.fullmatch(
            r"((?:.*/|)[^./][^.]*)\.([^/]*)", member.name
        )  # as in webdataset, a key ends at the first dot
        whole = member.offset_data + member.size <= blob.size
        if member.isfile() and parts:
            extension = parts[2].lower()
            last = extension.rpartition(".")[2]
            length = member.size if last in image_extensions() else 64 if last == "cls" else 0
            source.seek(member.offset_data)
            data = source.read(min(length, member.size)) if whole else b""
            yield parts[1], _Member(extension, member.offset_data, member.size, data)
        tar.members = []  # type: ignore[attr-defined]  # tarfile would keep every header
        if not whole:
            return


def _row(key: str, members: list[_Member], blob: Blob) -> Row:
    image = next((m for m in members if m.extension.rpartition(".")[2] in image_extensions()), None)
    label, reason = -1, None
    for m in members:
        if m.extension.rpartition(".")[2] == "cls":
            text = m.data.decode(errors="replace").strip()
            if re.fullmatch(r"\d{1,18}", text):
                label = int(text)
            else:
                reason = f"its label is not a whole number from 0 on: {text!r}"
    if image is None:
        return Row(key, reason="no image: only " + ", ".join(m.extension for m in members))
    cut = next((m for m in members if m.offset + m.size > blob.size), None)
    if cut:
        reason = f"cut off: {cut.size} bytes from {cut.offset}, the shard ends at {blob.size}"
    elif image.size == 0:
        reason = "the image has no bytes"
    return Row(key, image.offset, image.size, label, zlib.crc32(image.data), reason)
