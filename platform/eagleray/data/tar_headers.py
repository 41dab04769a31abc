"""Reads the headers of a tar that may come from a stranger, in time and memory that its size bounds.

The format is POSIX pax (IEEE Std 1003.1-2017, `pax`, "ustar" and "pax Interchange Format") with the extensions of GNU
tar. What is damaged ends the archive with one reason, and every member before it is kept. Decision 34 says why this is
not left to Python's tarfile, which reads intact archives in the same way.
"""

from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

BLOCK = 512  # bytes: headers and the data of members begin at multiples of it
LARGEST_HEADER = 2**20  # bytes of one extended header
LONGEST_NAME = 4096  # bytes, as PATH_MAX of Linux
MOST = 10**18  # bytes of a member
EXTENDED_HEADERS = 16  # most that one member may have
REGULAR = (b"\0", b"0", b"7", b"S")  # type flags of files: old, usual, contiguous and sparse
WITHOUT_DATA = b"123456"  # links, devices, folders and pipes, whatever size their headers say
LONG_NAME, LONG_LINK, GLOBAL, SPARSE = b"L", b"K", b"g", b"S"
EXTENDED = (LONG_NAME, LONG_LINK, GLOBAL, b"x", b"X")


class Member(NamedTuple):
    """A file in a tar."""

    name: str  # as tarfile has it: a lone surrogate stands for a byte that is not UTF-8
    offset: int  # of its data, bytes from the start of the tar
    size: int  # bytes, which may reach beyond the end of a tar that is cut off
    sparse: bool  # its bytes are stored without the holes, so they are not those of the file


class DamagedTar(ValueError):
    """The reason why a tar cannot be read from some byte on."""

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(reason)
        self.offset = offset


class _Header(NamedTuple):
    type: bytes
    name: bytes
    size: int


def members(file: BinaryIO, size: int) -> Iterator[Member]:
    """Yield the files in a tar of `size` bytes, in their order. `file` may be read and sought between them.

    Raises DamagedTar after the last file before the damage."""
    at = 0
    while at < size:
        block = _read(file, at, min(BLOCK, size - at))
        if not block.strip(b"\0"):
            return
        member, at = _next_member(file, at, size, block)
        if member:
            yield member
        if at > size:
            raise DamagedTar(at, f"its last member ends at byte {at} of {size}")


def _next_member(file: BinaryIO, start: int, size: int, block: bytes) -> tuple[Member | None, int]:
    """Return the member whose headers begin at `start`, None if it is not a file, and where the next one begins."""
    at, name, sparse = start, None, False
    stored: int | None = None  # bytes of the member's data, from a pax header
    for _ in range(EXTENDED_HEADERS + 1):
        header = _parse(block, at)
        if header.type not in EXTENDED:
            return _finish(file, at, size, block, header, name, stored, sparse)
        if header.size > LARGEST_HEADER:
            raise DamagedTar(start, f"an extended header of {header.size} bytes")
        data = _read(file, at + BLOCK, header.size)
        if header.type == LONG_NAME:
            name = data.partition(b"\0")[0] if name is None else name
        elif header.type != LONG_LINK:
            records = _records(data, start)
            sparse |= any(key.startswith(b"GNU.sparse.") for key in records)
            path = records.get(b"GNU.sparse.name", records.get(b"path"))
            if header.type == GLOBAL and (sparse or path is not None or b"size" in records):
                raise DamagedTar(start, "a global header with a name or a size")
            name = path.rstrip(b"/") if name is None and path is not None else name
            stored = _decimal(records[b"size"], start) if stored is None and b"size" in records else stored
        at += BLOCK + _padded(header.size)
        block = _read(file, at, BLOCK)
    raise DamagedTar(start, f"more than {EXTENDED_HEADERS} extended headers of one member")


def _finish(
    file: BinaryIO,
    at: int,
    size: int,
    block: bytes,
    header: _Header,
    name: bytes | None,
    stored: int | None,
    sparse: bool,
) -> tuple[Member | None, int]:
    """Return the member of the plain header at `at`, None if it is not a file, and where the next header begins."""
    offset, length = at + BLOCK, header.size if stored is None else stored
    name = header.name if name is None else name
    if len(name) > LONGEST_NAME:
        raise DamagedTar(at, f"a name of {len(name)} bytes, more than {LONGEST_NAME}")
    if header.type in WITHOUT_DATA:
        return None, offset
    more = block[482] if header.type == SPARSE else 0
    while more and offset < size:  # blocks with more of the map of holes
        more, offset = _read(file, offset, BLOCK)[504], offset + BLOCK
    end = offset + _padded(length)
    folder = header.type == b"\0" and header.name.endswith(b"/")
    if header.type not in REGULAR or folder:
        return None, offset if folder else end
    text = name.decode(errors="surrogateescape")
    return Member(text, offset, length, sparse or header.type == SPARSE), end


def _parse(block: bytes, at: int) -> _Header:
    """Parse a header block, whose first byte is byte `at` of the tar. Raises DamagedTar."""
    if len(block) < BLOCK:
        raise DamagedTar(at, f"a header ends after {len(block)} of {BLOCK} bytes")
    checksum = _number(block[148:156], at)
    unsigned = sum(block) - sum(block[148:156]) + 8 * ord(" ")
    if checksum != unsigned:
        signed = unsigned - 256 * sum(byte >= 128 for byte in block[:148] + block[156:])
        if checksum != signed:  # as old programs computed it
            raise DamagedTar(at, "the checksum of a header is wrong")
    size, kind = _number(block[124:136], at), block[156:157]
    if not 0 <= size < MOST:
        raise DamagedTar(at, f"a size of {size} bytes")
    name, prefix = block[:100].partition(b"\0")[0], block[345:500].partition(b"\0")[0]
    if prefix and kind not in (LONG_NAME, LONG_LINK, SPARSE):
        name = prefix + b"/" + name
    return _Header(kind, name, size)


def _read(file: BinaryIO, at: int, length: int) -> bytes:
    file.seek(at)
    data = file.read(length)
    if len(data) < length:
        raise DamagedTar(at, f"a header ends after {len(data)} of {length} bytes")
    return data


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _number(field: bytes, at: int) -> int:
    """Return the value of a number in a header: octal digits or, as GNU tar writes large ones, base 256."""
    if field[0] in (0x80, 0xFF):
        return int.from_bytes(field[1:]) - (256 ** (len(field) - 1) if field[0] == 0xFF else 0)
    try:
        return int(field.partition(b"\0")[0].strip() or b"0", 8)
    except ValueError:
        raise DamagedTar(at, "a header has no number where one belongs") from None


def _decimal(digits: bytes, at: int) -> int:
    if not digits.isdigit() or len(digits) > 18:
        raise DamagedTar(at, f"a pax header with a size of {digits[:40].decode(errors='replace')!r} bytes")
    return int(digits)


def _records(data: bytes, start: int) -> dict[bytes, bytes]:
    """Return the records of a pax header, each of which is `LENGTH KEY=VALUE` and a newline. Raises DamagedTar."""
    out, at = {}, 0
    while at < len(data) and data[at]:
        blank = data.find(b" ", at, at + 9)
        end = at + int(data[at:blank]) if blank > at and data[at:blank].isdigit() else 0
        key, equals, value = data[blank + 1 : end - 1].partition(b"=")
        if not at < blank < end <= len(data) or not equals or data[end - 1] != ord("\n"):
            raise DamagedTar(start, "a pax header cannot be read")
        out[key] = value
        at = end
    return out
