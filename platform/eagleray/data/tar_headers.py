"""Reads the headers of a tar, possibly from a stranger, in time and memory that are bounded by its size.

The format is POSIX pax (IEEE Std 1003.1-2017, `pax`, "ustar" and "pax Interchange Format") with GNU tar's extensions.
Damage ends the archive with one reason, and every member before it is kept. Every byte belongs to a member that is
yielded or counted, to the end of an archive, or to reported damage. Python's tarfile reads intact archives in the same
way; docs/decisions/0034 says why it is not used."""

from collections import Counter
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

BLOCK = 512  # bytes: headers and the data of members begin at multiples of it
LARGEST_HEADER = 2**20  # most bytes of one extended header
LONGEST_NAME = 4096  # most bytes of a name: PATH_MAX of Linux
MOST = 10**18  # most bytes of a member
COMPRESSED = {  # first bytes of compressed files
    b"\x1f\x8b": "gzip",
    b"\x1f\x9d": "compress",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"]\0\0": "lzma",
    b"LZIP": "lzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
    b"\xff\6\0\0sNaPpY": "snappy",
    b"PK\3\4": "zip",
    b"7z\xbc\xaf\x27\x1c": "7z",
    b"Rar!\x1a\7": "rar",
}
EXTENDED_HEADERS = 16  # most extended headers of one member
RECORDS = (1, 2, 4, 8, 16, 20)  # numbers of blocks, to a multiple of which programs pad an archive; mostly 20
REGULAR = (b"\0", b"0", b"7", b"S")  # type flags of files: old, usual, contiguous, sparse
WITHOUT_DATA = b"123456"  # links, devices, folders and pipes, which have no data whatever size their headers say
LONG_NAME, LONG_LINK, GLOBAL, SPARSE = b"L", b"K", b"g", b"S"
EXTENDED = (LONG_NAME, LONG_LINK, GLOBAL, b"x", b"X")
# Kinds that `members` counts and does not yield. ARCHIVE counts archives that follow the end of another one.
HARD_LINK, SYMBOLIC_LINK, FOLDER, SPECIAL, ARCHIVE = "hard link", "symbolic link", "folder", "special file", "archive"
KINDS = {b"1": HARD_LINK, b"2": SYMBOLIC_LINK, b"5": FOLDER}


class Member(NamedTuple):
    """A file in a tar."""

    name: str  # decoded as by tarfile: a lone surrogate stands for a byte that is not UTF-8
    offset: int  # first byte of its data in the tar
    size: int  # bytes; it may reach beyond the end of a truncated tar
    sparse: bool  # whether the file's holes are left out, so that the stored bytes are not the file's


class DamagedTar(ValueError):
    """The reason why a tar cannot be read from some byte on."""

    offset = 0  # first byte of the unreadable member in the tar


class Zeros(DamagedTar):
    """Zeros inside of an archive, where data may be lost."""


class _Header(NamedTuple):
    type: bytes
    name: bytes
    size: int


def compression(head: bytes) -> str:
    """Return the name of the compression of a file that begins with `head`, or "" if it is not compressed."""
    skipped = head[1:4] == b"*M\x18" and head[0] >> 4 == 5  # a skippable zstd frame, as parallel compressors write
    return "zstd" if skipped else next((kind for magic, kind in COMPRESSED.items() if head.startswith(magic)), "")


def members(file: BinaryIO, size: int, passed: Counter[str] | None = None, base: int = 0) -> Iterator[Member]:
    """Yield the files in a tar of `size` bytes, in their order. The caller may read and seek `file` between them.

    Members that are not files are counted in `passed`. Joined archives are read one after the other. The first archive
    begins at byte `base`, negative if it was read in part before. Raises DamagedTar behind the last intact file."""
    at, passed = 0, Counter() if passed is None else passed
    try:
        while at < size:
            block = _read(file, at, min(BLOCK, size - at))
            if block.strip(b"\0"):
                member, at = _next_member(file, at, size, block)
                if isinstance(member, Member):
                    yield member
                else:
                    passed[member] += 1
                if at > size:
                    raise DamagedTar(f"its last member ends at byte {at} of {size}")
            else:
                at = base = _behind_end(file, at, base, size, block)
                if at == size:
                    return
                passed[ARCHIVE] += 1
        if size:
            raise DamagedTar("it lacks the zeros that end an archive")
    except DamagedTar as e:
        e.offset = at
        raise


def _behind_end(file: BinaryIO, at: int, base: int, size: int, block: bytes) -> int:
    """Return the first byte of the next archive or, without one, the size of the file. The zeros `block` at `at` must
    end the archive that begins at `base`. Raises Zeros if they do not, as data may be lost."""
    end = at + len(block)
    while end < min(size, at + (RECORDS[-1] + 2) * BLOCK):
        block = _read(file, end, min(BLOCK, size - end))
        if block.strip(b"\0"):
            break
        end += len(block)
    ends = any((end - base) % (BLOCK * n) == 0 and end - at < (n + 2) * BLOCK for n in RECORDS)
    if ends and (end == size or _is_header(block)):
        return end
    raise Zeros("zeros that are no end of an archive")


def _is_header(block: bytes) -> bool:
    try:
        _parse(block)
    except DamagedTar:
        return False
    return True


def _next_member(file: BinaryIO, start: int, size: int, block: bytes) -> tuple[Member | str, int]:
    """Return the member whose headers begin at `start`, or its kind if it is no file, and the next member's offset."""
    at, name, sparse = start, None, False
    stored: int | None = None  # bytes of the member's data, from a pax header
    for _ in range(EXTENDED_HEADERS + 1):
        header = _parse(block)
        if header.type not in EXTENDED:
            return _finish(file, at, size, block, header, name, stored, sparse)
        if header.size > LARGEST_HEADER:
            raise DamagedTar(f"an extended header of {header.size} bytes")
        data = _read(file, at + BLOCK, header.size)
        if header.type == LONG_NAME:
            long = data.partition(b"\0")[0]
            if len(long) < max(len(data) - 1, 1):  # one zero ends the name
                raise DamagedTar(f"a long name that ends after {len(long)} of {len(data)} bytes")
            name = long if name is None else name
        elif header.type != LONG_LINK:
            records = _records(data)
            sparse |= any(key.startswith(b"GNU.sparse.") for key in records)
            path = records.get(b"GNU.sparse.name", records.get(b"path"))
            if header.type == GLOBAL and (sparse or path is not None or b"size" in records):
                raise DamagedTar("a global header with a name or a size")
            if path and b"\0" in path:
                raise DamagedTar("a pax header with a zero in a name")
            name = path.rstrip(b"/") if name is None and path else name
            stored = _decimal(records[b"size"]) if stored is None and b"size" in records else stored
        at += BLOCK + _padded(header.size)
        block = _read(file, at, BLOCK)
    raise DamagedTar(f"more than {EXTENDED_HEADERS} extended headers of one member")


def _finish(
    file: BinaryIO,
    at: int,
    size: int,
    block: bytes,
    header: _Header,
    name: bytes | None,
    stored: int | None,
    sparse: bool,
) -> tuple[Member | str, int]:
    """Return the member of the plain header at `at`, or its kind if it is not a file, and the next header's offset."""
    offset, length = at + BLOCK, header.size if stored is None else stored
    name = header.name if name is None else name
    if len(name) > LONGEST_NAME:
        raise DamagedTar(f"a name of {len(name)} bytes, more than {LONGEST_NAME}")
    if header.type in WITHOUT_DATA:
        return KINDS.get(header.type, SPECIAL), offset
    more = block[482] if header.type == SPARSE else 0
    while more and offset < size:  # blocks that continue the map of holes
        more, offset = _read(file, offset, BLOCK)[504], offset + BLOCK
    end = offset + _padded(length)
    folder = header.type == b"\0" and header.name.endswith(b"/")
    if header.type not in REGULAR or folder:
        return (FOLDER, offset) if folder else (SPECIAL, end)
    text = name.decode(errors="surrogateescape")
    return Member(text, offset, length, sparse or header.type == SPARSE), end


def _parse(block: bytes) -> _Header:
    """Parse a header block. Raises DamagedTar when its checksum, a number or its length is wrong."""
    if len(block) < BLOCK:
        raise DamagedTar(f"a header ends after {len(block)} of {BLOCK} bytes")
    checksum = _number(block[148:156])
    unsigned = sum(block) - sum(block[148:156]) + 8 * ord(" ")
    if checksum != unsigned:
        signed = unsigned - 256 * sum(byte >= 128 for byte in block[:148] + block[156:])
        if checksum != signed:  # old programs sum signed bytes
            raise DamagedTar("the checksum of a header is wrong")
    size, kind = _number(block[124:136]), block[156:157]
    if not 0 <= size < MOST:
        raise DamagedTar(f"a size of {size} bytes")
    name, prefix = block[:100].partition(b"\0")[0], block[345:500].partition(b"\0")[0]
    if prefix and kind not in (LONG_NAME, LONG_LINK, SPARSE) and block[257:265] != b"ustar  \0":  # GNU has times there
        name = prefix + b"/" + name
    return _Header(kind, name, size)


def _read(file: BinaryIO, at: int, length: int) -> bytes:
    file.seek(at)
    data = file.read(length)
    if len(data) < length:
        raise DamagedTar(f"a header ends after {len(data)} of {length} bytes")
    return data


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _number(field: bytes) -> int:
    """Return the value of a number in a header: octal digits or, for large numbers of GNU tar, base 256."""
    if field[0] in (0x80, 0xFF):
        return int.from_bytes(field[1:]) - (256 ** (len(field) - 1) if field[0] == 0xFF else 0)
    try:
        return int(field.partition(b"\0")[0].strip() or b"0", 8)
    except ValueError:
        raise DamagedTar("a header has no number where one belongs") from None


def _decimal(digits: bytes) -> int:
    if not digits.isdigit() or len(digits) > 18:
        raise DamagedTar(f"a pax header with a size of {digits[:40].decode(errors='replace')!r} bytes")
    return int(digits)


def _records(data: bytes) -> dict[bytes, bytes]:
    """Return the records of a pax header, each `LENGTH KEY=VALUE` and a newline. Raises DamagedTar."""
    out, at = {}, 0
    while at < len(data):
        blank = data.find(b" ", at, at + 9)
        end = at + int(data[at:blank]) if blank > at and data[at:blank].isdigit() else 0
        key, equals, value = data[blank + 1 : end - 1].partition(b"=")
        if not at < blank < end <= len(data) or not equals or data[end - 1] != ord("\n"):
            raise DamagedTar("a pax header cannot be read")
        out[key] = value
        at = end
    return out
