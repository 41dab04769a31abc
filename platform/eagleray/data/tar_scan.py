"""Lists the samples of a tar shard in one pass over its bytes: positions, labels and checksums."""

import io
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple, cast

from eagleray.data.checksum import crc32
from eagleray.data.pixels import HEIC_EXTENSIONS, NO_HEIC, image_extensions
from eagleray.data.tar_headers import DamagedTar, members
from eagleray.storage.blob import Blob
from eagleray.storage.range_file import RangeFile, Span

READ = 4 * 2**20  # bytes per request
LARGEST = 2**29  # bytes of an image; the pixels of the largest image that is decoded take as much
LABEL = 64  # bytes of a label that are read
MEMBERS = 1000  # most of one sample


@dataclass(frozen=True, slots=True)
class Row:
    """One sample of a shard. With an empty key, the row describes a fault of the shard itself."""

    key: str = ""
    offset: int = -1
    size: int = 0
    label: int = -1
    crc: int | None = None
    reason: str | None = None
    unread: int = 0  # images of the sample beside the first


def key_and_extension(name: str) -> tuple[str, str] | None:
    """Split the name of a member as webdataset does, in linear time; None for a name without a key or an extension.

    The key ends at the first dot of the file name. In `folder/.name.jpg`, which has nothing before that dot, it is
    `folder/`, unless the folder's name has a dot.
    """
    folder, slash, base = name.rpartition("/")
    stem, dot, extension = base.partition(".")
    last = folder.rstrip("/").rpartition("/")[2]
    if not dot or not (stem or (last and "." not in last)):
        return None
    return folder + slash + stem, extension.lower()


def scan(blob: Blob) -> Iterator[Row]:
    """Yield the samples of one tar, grouped by key as webdataset does. A broken sample's `reason` says what is
    wrong."""
    source = cast(BinaryIO, io.BufferedReader(RangeFile(Span("", blob.url, 0, blob.size)), READ))
    samples, damage = 0, list[DamagedTar]()
    for key, group in itertools.groupby(_files(source, blob, damage), key=lambda m: m[0]):
        samples += 1
        yield _row(key, [m for _, m in itertools.islice(group, MEMBERS + 1)], blob)
    if damage and damage[0].offset:
        yield Row(
            offset=damage[0].offset, reason=f"the shard is cut off or damaged after {samples} samples: {damage[0]}"
        )
    elif damage:
        yield Row(reason=f"not a tar archive: {damage[0]}")
    elif samples == 0:
        yield Row(reason="the shard holds no samples" if blob.size else "the file is empty")


class _Member(NamedTuple):
    extension: str
    last: str  # the last extension
    offset: int
    size: int
    sparse: bool
    crc: int | None  # of an image
    label: bytes


def _files(source: BinaryIO, blob: Blob, damage: list[DamagedTar]) -> Iterator[tuple[str, _Member]]:
    """Yield the key and the member of every file, up to the first whose bytes are cut off.

    Damage is put into a list, as an error would lose the sample before it.
    """
    try:
        for name, offset, size, sparse in members(source, blob.size):
            if not (parts := key_and_extension(name)):
                continue
            key, extension = parts
            last, whole, crc, label = extension.rpartition(".")[2], offset + size <= blob.size, None, b""
            if whole and last in image_extensions() and size <= LARGEST:
                crc = _checksum(source, offset, size)
            elif whole and last == "cls":
                source.seek(offset)
                label = source.read(min(LABEL, size))
            yield key, _Member(extension, last, offset, size, sparse, crc, label)
            if not whole:
                return
    except DamagedTar as e:
        damage.append(e)


def _checksum(source: BinaryIO, offset: int, size: int) -> int:
    """Return the CRC-32 of some bytes, of which only a part is in memory at a time."""
    source.seek(offset)
    crc = crc32(source.read(min(READ, size)))
    for at in range(READ, size, READ):
        crc = crc32(source.read(min(READ, size - at)), crc)
    return crc


def _row(key: str, members: list[_Member], blob: Blob) -> Row:
    images = [m for m in members if m.last in image_extensions()]
    image = images[0] if images else None
    label, reason = -1, _fault(members)
    for m in members:
        if m.last == "cls" and not m.sparse:
            text = m.label.decode(errors="replace").strip()
            if re.fullmatch(r"\d{1,18}", text):
                label = int(text)
            else:
                reason = f"its label is not a whole number from 0 on: {repr(text)[:100]}"
    if image is None:
        heic = NO_HEIC if any(m.last in HEIC_EXTENSIONS for m in members) else ""
        return Row(key, reason=heic or ("no image: only " + ", ".join(m.extension for m in members))[:200])
    cut = next((m for m in members if m.offset + m.size > blob.size), None)
    if cut:
        reason = f"cut off: {cut.size} bytes from {cut.offset}, the shard ends at {blob.size}"
    elif image.size == 0 and not image.sparse:
        reason = "the image has no bytes"
    elif image.size > LARGEST:
        reason = f"the image has {image.size} bytes, more than {LARGEST}"
    return Row(key, image.offset, image.size, label, image.crc, reason, len(images) - 1)


def _fault(members: list[_Member]) -> str | None:
    """Return what is wrong with the members of a sample together, or None."""
    if len(members) > MEMBERS:
        return f"more than {MEMBERS} members"
    if len({m.extension for m in members}) < len(members):  # webdataset refuses the whole shard
        extension, times = Counter(m.extension for m in members).most_common(1)[0]
        return f"{times} members .{extension[:40]}"
    sparse = next((m for m in members if m.sparse and (m.last == "cls" or m.last in image_extensions())), None)
    return f"its .{sparse.extension[:40]} is stored sparse, so its bytes are not in one piece" if sparse else None
