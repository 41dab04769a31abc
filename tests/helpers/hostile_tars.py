"""Make tars as strangers may: one for each way to harm a reader, and mutations of intact ones."""

import functools
import io
import tarfile
from random import Random
from typing import NamedTuple

from helpers.pictures import Member, jpeg, sample

BLOCK = 512
NAME, SIZE, TYPE, MAGIC, PREFIX, MORE = (0, 100), (124, 136), (156, 157), (257, 265), (345, 500), (482, 484)


def mend(header: bytes) -> bytes:
    """Return a header block with the checksum that its bytes have."""
    total = sum(header[:148]) + 8 * 32 + sum(header[156:])
    return header[:148] + b"%06o\0 " % total + header[156:]


def header(name: bytes, size: bytes | int, kind: bytes = b"0") -> bytes:
    """Make a header block; a size in bytes is written as it is."""
    if isinstance(size, int):
        size = b"%011o\0" % size if size < 8**11 else b"\x80" + size.to_bytes(11)
    number = size.ljust(12, b"\0")
    block = name.ljust(100, b"\0") + b"0000644\0" + b"0000000\0" * 2 + number + b"00000000000\0"
    return mend((block + b" " * 8 + kind + bytes(100) + b"ustar\00000").ljust(BLOCK, b"\0"))


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % BLOCK)


def member(name: bytes, data: bytes, kind: bytes = b"0") -> bytes:
    return header(name, len(data), kind) + padded(data)


def pax(*records: tuple[bytes, bytes], kind: bytes = b"x") -> bytes:
    """Make an extended header."""
    return member(b"pax", b"".join(record(*r) for r in records), kind)


def record(key: bytes, value: bytes) -> bytes:
    length = len(key) + len(value) + 3
    while len(b"%d" % length) + len(key) + len(value) + 3 != length:
        length = len(b"%d" % length) + len(key) + len(value) + 3
    return b"%d %s=%s\n" % (length, key, value)


def whole(*keys: int) -> bytes:
    """Make samples such as `s0007`, without the end of a tar."""
    return b"".join(member(name.encode(), data) for key in keys for name, data in sample(key))


class Case(NamedTuple):
    data: bytes
    good: list[str]  # the keys of its usable samples
    reason: str  # a pattern for what is wrong with the rest; empty where nothing is


IMAGE = jpeg(1)
NEGATIVE = b"\xff" + (2**88 - 512).to_bytes(11)  # -512
HUGE = b"\x80" + (2**62).to_bytes(11)
END = bytes(1024)
BEFORE = ["s0000", "s0001"]


def after_two(data: bytes, reason: str, *good: str) -> Case:
    """Put two samples before and one behind some members."""
    return Case(whole(0, 1) + data + whole(2) + END, [*BEFORE, *good], reason)


CASES = {
    "a size of -512 leads back to the header": after_two(header(b"noext", NEGATIVE), "damaged after 2 .* size of -512"),
    "a size of -512 of an image": after_two(header(b"a.jpg", NEGATIVE), "damaged after 2 .* size of -512"),
    "a negative size in octal": after_two(header(b"a.jpg", b"-0000001000"), "damaged after 2 .* size of -512"),
    "a size of 2^62": after_two(header(b"a.jpg", HUGE), "damaged after 2 .* a size of 4611686018427387904"),
    "a size beyond the end": after_two(header(b"a.jpg", 2**31), "cut off: 2147483648 bytes"),
    "a size beyond the end of what is no sample": after_two(header(b"noext", 2**31), "damaged after 2 .* last member"),
    "a pax size below 0": after_two(pax((b"size", b"-512")) + header(b"a.jpg", 0), "damaged after 2 .* '-512' bytes"),
    "a pax size of 30 digits": after_two(
        pax((b"size", b"9" * 30)) + header(b"a.jpg", 0), "damaged after 2 .* '9+' bytes"
    ),
    "a long name of 2^62 bytes": after_two(header(b"x", HUGE, b"L"), "damaged after 2 .* size of 4611686018427387904"),
    "a long name of 2 MiB": after_two(member(b"x", b"n" * 2**21, b"L"), "damaged after 2 .* header of 2097152 bytes"),
    "a pax header of 2^62 bytes": after_two(header(b"x", HUGE, b"x"), "damaged after 2 .* size of 4611686018427387904"),
    "3,000 long names of one member": after_two(3000 * member(b"x", b"a.jpg", b"L"), "more than 16 extended headers"),
    "a path of 40 kB of slashes": after_two(
        pax((b"path", b"a/" * 20_000 + b"x")) + member(b"x", IMAGE), "damaged after 2 .* a name of 40001 bytes"
    ),
    "a path of 4 kB of slashes": after_two(
        pax((b"path", b"a/" * 2000 + b"b.jpg")) + member(b"x", IMAGE), "", "a/" * 2000 + "b", "s0002"
    ),
    "a global header with a path": after_two(pax((b"path", b"a.jpg"), kind=b"g"), "a global header with a name"),
    "a global header with a comment": after_two(pax((b"comment", b"0" * 40), kind=b"g"), "", "s0002"),
    "pax records without an end": after_two(
        member(b"x", b"99999999 path=a.jpg\n", b"x") + member(b"x", IMAGE), "damaged after 2 .* pax header cannot be"
    ),
    "a pax record without a length": after_two(
        member(b"x", b"path=a.jpg\n", b"x") + member(b"x", IMAGE), "damaged after 2 .* pax header cannot be"
    ),
    "sparse in GNU's format": after_two(member(b"a.jpg", IMAGE, b"S"), r"its \.jpg is stored sparse", "s0002"),
    "sparse in pax 0.1": after_two(
        pax((b"GNU.sparse.size", b"9999"), (b"GNU.sparse.map", b"0,1,5000,9")) + member(b"a.jpg", IMAGE),
        r"its \.jpg is stored sparse",
        "s0002",
    ),
    "sparse in pax 1.0, with a text for its size": after_two(
        pax((b"GNU.sparse.major", b"1"), (b"GNU.sparse.minor", b"0"), (b"GNU.sparse.realsize", b"x"))
        + member(b"a.jpg", IMAGE),
        r"its \.jpg is stored sparse",
        "s0002",
    ),
    "a map of holes that never ends": Case(
        whole(0, 1) + mend(header(b"a.jpg", 0, b"S")[:482] + b"\1" + bytes(29)) + 3000 * (b"\1" * BLOCK) + END,
        BEFORE,
        r"its \.jpg is stored sparse",
    ),
    "a name in Latin-1": after_two(member(b"caf\xe9.jpg", IMAGE), "", "caf\\xe9", "s0002"),
    "a pax name in Latin-1": after_two(
        pax((b"path", b"\xe9/\xe9.jpg")) + member(b"x", IMAGE), "", "\\xe9/\\xe9", "s0002"
    ),
    "a UTF-8 surrogate": after_two(member(b"\xed\xa0\x80.jpg", IMAGE), "", "\\xed\\xa0\\x80", "s0002"),
    "a private character like a stored byte": after_two(
        member("\uefe9.jpg".encode(), IMAGE), "", "\\xee\\xbf\\xa9", "s0002"
    ),
    "a name that a terminal obeys": after_two(member(b"\x1b]0;x\x07.jpg", IMAGE), "", "\\x1b]0;x\\x07", "s0002"),
    "names outside of the shard": after_two(
        member(b"../../x.jpg", IMAGE) + member(b"/abs.jpg", IMAGE), "", "../../x", "/abs", "s0002"
    ),
    "times in place of a prefix, by tar --incremental": after_two(
        mend(header(b"a.jpg", len(IMAGE))[:257] + b"ustar  ".ljust(88, b"\0") + b"14763210000".ljust(167, b"\0"))
        + padded(IMAGE),
        "",
        *("a", "s0002"),
    ),
    "two images of one key": after_two(2 * member(b"a.jpg", IMAGE), r"2 members \.jpg", "s0002"),
    "two labels of one key": after_two(
        member(b"a.jpg", IMAGE) + member(b"a.cls", b"1") + member(b"a.cls", b"2"), r"2 members \.cls", "s0002"
    ),
    "1,500 members of one key": after_two(
        member(b"a.jpg", IMAGE) + b"".join(member(b"a.%d.txt" % i, b"") for i in range(1500)),
        "more than 1000 members",
        "s0002",
    ),
    "a damaged header behind a whole sample": Case(
        whole(0, 1) + b"x" * BLOCK + whole(2) + END, BEFORE, "damaged after 2 .* no number where"
    ),
    "a wrong checksum": Case(whole(0, 1) + b"y" + whole(2)[1:], BEFORE, "damaged after 2 .* checksum of a header"),
    "an extended header and then nothing": Case(
        whole(0, 1) + pax((b"path", b"a.jpg")), BEFORE, "damaged after 2 .* ends after 0 of 512"
    ),
}


@functools.cache
def intact() -> list[bytes]:
    """Return a tar of every format, with long and foreign names, links, folders and sparse files."""
    names = ["a.jpg", "a.cls", "ö/" + "n" * 90 + ".png", "ö/" + "n" * 90 + ".cls", "d" * 120 + "/b.c.jpg", "README"]
    members: list[Member] = [(name, b"7" if name.endswith("cls") else bytes(700)) for name in names]
    out = [archive(members, kind) for kind in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)]
    out.append(archive([m for m in members if m[0].isascii()], tarfile.USTAR_FORMAT))
    out.append(whole(0) + CASES["sparse in pax 0.1"].data + END)
    out.append(whole(0) + mend(header(b"a.jpg", 9, b"S")[:482] + b"\1" + bytes(29)) + bytes(BLOCK) + padded(b"x") + END)
    return out


def archive(members: list[Member], kind: int) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=kind) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        end = tar.offset
    return buffer.getvalue()[:end] + END


FIELDS: dict[tuple[int, int], list[bytes]] = {
    SIZE: [NEGATIVE, HUGE, b"-0000000512", b"77777777777", b"00000000000", b"\x80" * 12, b"\xff" * 12, b"cat"],
    TYPE: [bytes([kind]) for kind in b"\x000123456789LKxXgSDMNVA~\xff"],
    NAME: [b"b.jpg", b"b.cls", b"noext", b"\xe9.jpg", b".", b"/", b"../x.jpg", b"a" * 100, b"\0.jpg"],
    PREFIX: [b"", b"../..", b"\xff" * 155],
    MORE: [b"\1\1", b"\0\0"],
    MAGIC: [b"ustar  \0", b"ustar\x0000", b"\xff" * 8],
}
BODIES = [
    pax((b"size", b"-1")),
    pax((b"size", b"0x9")),
    pax((b"size", b"999999999999999999")),
    pax((b"path", b"\xe9.jpg")),
    pax((b"path", b"/" * 3000)),
    pax((b"GNU.sparse.map", b"1,2,3"), (b"GNU.sparse.size", b"cat")),
    pax((b"GNU.sparse.major", b"1"), (b"GNU.sparse.minor", b"0")),
    pax((b"size", b"1"), kind=b"g"),
    member(b"x", b"long.jpg\0", b"L"),
    member(b"x", b"\xff" * 600, b"L"),
    member(b"x", b"0 =\n", b"x"),
    member(b"x", b"5 a=b\n" * 50, b"x"),
]


def mutate(random: Random) -> bytes:
    """Return an intact tar with one to four changes; the checksums of changed headers are right."""
    data = bytearray(random.choice(intact()))
    for _ in range(random.randint(1, 4)):
        at = random.randint(0, max(len(data) // BLOCK - 3, 0)) * BLOCK
        match random.randint(0, 9):
            case 0 | 1 | 2 | 3:
                field = random.choice(list(FIELDS))
                _set(data, at, field, random.choice(FIELDS[field]))
            case 4:
                first = random.randint(0, BLOCK - 16)
                _set(data, at, (first, first + 16), random.randbytes(16))
            case 5 | 6:
                data[at:at] = random.choice(BODIES)
            case 7:
                data[at : at + BLOCK] = random.choice([b"", bytes(BLOCK), 2 * bytes(data[at : at + BLOCK])])
            case 8:
                del data[random.randint(0, len(data)) :]
            case 9:
                junk, start = random.randbytes(random.randint(1, 64)), random.randint(0, len(data))
                data[start : start + len(junk)] = junk
    return bytes(data)


def _set(data: bytearray, at: int, field: tuple[int, int], value: bytes) -> None:
    block = bytearray(data[at : at + BLOCK].ljust(BLOCK, b"\0"))
    start, stop = field
    length = stop - start
    block[start:stop] = value[:length].ljust(length, b"\0")
    data[at : at + BLOCK] = mend(bytes(block))
