"""Lists the samples of a tar shard in one pass over its bytes: positions, labels and checksums."""

import io
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import BinaryIO, NamedTuple, cast

from eagleray.data.checksum import crc32
from eagleray.data.pixels import HEIC_EXTENSIONS, NO_HEIC, begins_like_image, image_extensions
from eagleray.data.tar_headers import (
    ARCHIVE,
    BLOCK,
    FOLDER,
    HARD_LINK,
    SPECIAL,
    SYMBOLIC_LINK,
    DamagedTar,
    Zeros,
    compression,
    members,
)
from eagleray.storage.blob import Blob
from eagleray.storage.range_file import RangeFile, Span

READ = 4 * 2**20  # bytes per request
LARGEST = 2**29  # most bytes of an image file: as many as the decoded pixels of an RGB image of MAX_PIXELS
LABEL = 64  # bytes that are read of a label
MEMBERS = 1000  # most members of one sample
START = 16  # number of first bytes, which tell the format of an image
NO_IMAGE = "no image: only "
FORMS = {b"\xff\xd8": b"\xff\xd9", b"\x89PNG": b"IEND\xaeB`\x82"}  # first and last bytes of formats with a known end
TAIL = 2**16  # bytes at the end of a file in which the last non-zero byte is searched
HIDDEN, EXTENSIONLESS = "hidden file", "extensionless file"
UNREAD, UNLABELLED = "image", "label"  # kinds: a further image of a sample; a label that cannot be read
# All kinds by which skipped members and joined archives are counted.
PASSED_OVER = (HARD_LINK, SYMBOLIC_LINK, FOLDER, SPECIAL, HIDDEN, EXTENSIONLESS, UNREAD, UNLABELLED, ARCHIVE)


@dataclass(frozen=True, slots=True)
class Row:
    """One sample of a shard. A row with an empty key describes a fault of the shard itself."""

    key: str = ""
    offset: int = -1
    size: int = 0
    label: int = -1
    crc: int | None = None
    reason: str | None = None
    unread: int = 0  # images of the sample beside the one that is read
    unlabelled: int = 0  # 1 if it has a label that cannot be read
    extension: str | None = None  # extension of the image's member


def key_and_extension(name: str) -> tuple[str, str] | None:
    """Split the name of a member as webdataset does, in linear time. None for a name without a key or an extension.

    The key ends at the first dot of the file name. A name that begins with a dot, such as macOS's `._name`, has no
    key."""
    folder, slash, base = name.rpartition("/")
    stem, _, extension = base.partition(".")
    return (folder + slash + stem, extension.lower()) if stem and len(stem) < len(base) else None


def scan(blob: Blob, passed: Counter[str] | None = None) -> Iterator[Row]:
    """Yield the samples of one tar, grouped by key as webdataset does. A broken sample's `reason` says what is wrong.

    Members that are no part of a sample are counted in `passed`, by kind."""
    source = cast(BinaryIO, io.BufferedReader(RangeFile(Span("", blob.url, 0, blob.size)), READ))
    passed = Counter() if passed is None else passed
    samples, damage = 0, list[DamagedTar]()
    for (_, key), group in itertools.groupby(_files(source, blob, damage, passed), key=lambda m: m[0]):
        samples += 1
        row = _row(key, [m for _, m in itertools.islice(group, MEMBERS + 1)], blob)
        yield _checked(row, source, damage[0]) if damage and not row.reason else row
    if damage and damage[0].offset:
        yield Row(offset=damage[0].offset, reason=_said(damage[0], samples, blob.size))
    elif damage:
        source.seek(0)
        kind = compression(source.read(16))
        yield Row(reason=f"not a tar archive: {f'compressed with {kind}; unpack it' if kind else damage[0]}")
    elif samples == 0:
        only = counted(passed)
        yield Row(reason=f"the shard holds no samples{only and f', only {only}'}" if blob.size else "the file is empty")


def counted(passed: Mapping[str, int]) -> str:
    """Return text with the number of members of each kind that are no part of a sample, the most frequent first."""
    kinds = sorted((-n, kind) for kind, n in passed.items() if kind not in (UNREAD, UNLABELLED, ARCHIVE))
    return ", ".join(f"{-n:,} {kind}{'s' * (n != -1)}" for n, kind in kinds)


def _members(passed: Counter[str]) -> int:
    """Return how many members belong to no sample. Unread images and labels are counted later, while rows are read."""
    return passed.total() - passed[UNREAD] - passed[UNLABELLED]


def _said(damage: DamagedTar, samples: int, size: int) -> str:
    """Return text that says after how many samples a shard is damaged, and how many bytes are not read."""
    rest = f"; {size - damage.offset:,} of {size:,} bytes are not read" if damage.offset < size else ""
    return f"the shard is cut off or damaged after {samples} samples: {damage}{rest}"


def _checked(row: Row, source: BinaryIO, damage: DamagedTar) -> Row:
    """Return the row of the last sample before damage: an unusable row if the zeros after it may begin in its image."""
    end = row.offset + row.size
    if not isinstance(damage, Zeros) or -(-end // BLOCK) * BLOCK != damage.offset:
        return row
    source.seek(end - 1)
    return replace(row, reason="its last bytes are zeros, as what follows them") if source.read(1) == b"\0" else row


class _Member(NamedTuple):
    extension: str
    last: str  # the last part of the extension, such as png of mask.png
    offset: int
    size: int
    sparse: bool
    crc: int | None  # CRC-32 of an image; None for other members
    label: bytes
    begins: bool  # whether its first bytes are those of an image


def _files(
    source: BinaryIO, blob: Blob, damage: list[DamagedTar], passed: Counter[str]
) -> Iterator[tuple[tuple[int, str], _Member]]:
    """Yield every file with the index of its archive and its key, up to the first file whose bytes are cut off.

    Damage is put into the list `damage`, because an error would lose the sample before it."""
    doubtful = 0, 0  # end of a file that zeros may have overwritten; number of members skipped before it
    try:
        for name, offset, size, sparse in members(source, blob.size, passed):
            doubtful = 0, 0
            if not (parts := key_and_extension(name)):
                passed[HIDDEN if name.rpartition("/")[2].startswith(".") else EXTENSIONLESS] += 1
                continue
            key, extension = parts
            last, whole, crc, label = extension.rpartition(".")[2], offset + size <= blob.size, None, b""
            begins = lacks_end = False
            if whole and last in image_extensions() and size <= LARGEST:
                crc, start, lacks_end = _checksum(source, offset, size)
                begins = begins_like_image(start)
            elif whole and last == "cls":
                source.seek(offset)
                label = source.read(min(LABEL, size))
                lacks_end = bool(label) and not any(label)  # a text that ends in zeros may be UTF-16
            if lacks_end:
                doubtful = -(-(offset + size) // BLOCK) * BLOCK, _members(passed)
            yield (passed[ARCHIVE], key), _Member(extension, last, offset, size, sparse, crc, label, begins)
            if not whole:
                return
        if doubtful[0] and doubtful[1] == _members(passed):
            damage.append(Zeros("the zeros at its end begin inside of its last file"))
            damage[0].offset = doubtful[0]
    except DamagedTar as e:
        damage.append(e)


def _checksum(source: BinaryIO, offset: int, size: int) -> tuple[int, bytes, bool]:
    """Return the CRC-32 of an image, its first bytes, and whether it ends in zeros although its format does not. Only a
    part of it is in memory at a time."""
    source.seek(offset)
    tail = source.read(min(READ, size))
    crc, first = crc32(tail), tail[:START]
    for at in range(READ, size, READ):
        data = source.read(min(READ, size - at))
        crc, tail = crc32(data, crc), tail[-TAIL:] + data[-TAIL:]
    if not tail.endswith(b"\0"):
        return crc, first, False
    end = next((end for start, end in FORMS.items() if first.startswith(start)), None)
    return crc, first, not tail[-TAIL:].rstrip(b"\0").endswith(end) if end else not any(first[:4])


def _row(key: str, members: list[_Member], blob: Blob) -> Row:
    images = [m for m in members if m.last in image_extensions()]
    image = next((m for m in images if m.begins), images[0] if images else None)
    label, reason = -1, _fault(members)
    texts = [b"" if m.sparse else m.label.strip() for m in members if m.last == "cls"]
    for text in texts:
        if re.fullmatch(rb"\d{1,18}", text):
            label = int(text)
    cut = next((m for m in members if m.offset + m.size > blob.size), None)
    lost = cut and f"cut off: {cut.size} bytes from {cut.offset}, the shard ends at {blob.size}"
    if image is None:
        heic = NO_HEIC if any(m.last in HEIC_EXTENSIONS for m in members) else ""
        return Row(key, reason=lost or heic or (NO_IMAGE + ", ".join(m.extension for m in members))[:200])
    if lost:
        reason = lost
    elif image.size == 0 and not image.sparse:
        reason = "the image has no bytes"
    elif image.size > LARGEST:
        reason = f"the image has {image.size} bytes, more than {LARGEST}"
    unlabelled, unread = int(bool(texts) and label < 0), len(images) - 1
    return Row(key, image.offset, image.size, label, image.crc, reason, unread, unlabelled, image.extension)


def _fault(members: list[_Member]) -> str | None:
    """Return what is wrong with the members of a sample taken together, or None."""
    if len(members) > MEMBERS:
        return f"more than {MEMBERS} members"
    if len({m.extension for m in members}) < len(members):  # webdataset refuses the whole shard for these
        extension, times = Counter(m.extension for m in members).most_common(1)[0]
        return f"{times} members .{extension[:40]}"
    sparse = next((m for m in members if m.sparse and m.last in image_extensions()), None)
    return f"its .{sparse.extension[:40]} is stored sparse, so its bytes are not in one piece" if sparse else None
