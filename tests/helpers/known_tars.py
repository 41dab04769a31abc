"""Build tars from known members, and change them in known ways, so that it is known what was in each."""

import functools
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import NamedTuple

from helpers.hostile_tars import BLOCK, header, member, padded, pax
from helpers.pictures import jpeg

RECORD = 20 * BLOCK
FOLDERS = ["", "d/", "./", "a.b/c/", "long/" * 30]
KINDS = {b"1": "hard link", b"2": "symbolic link", b"5": "folder", b"6": "special file", b"V": "special file"}


class Part(NamedTuple):
    """A piece of a tar: a member or an end, each with its padding."""

    kind: str  # "image", "sibling" of an image, "end", or what it is counted as
    key: str  # of its sample
    start: int  # of its first header, bytes from the start of the tar
    data: int  # of its data
    size: int  # of its data, bytes
    stop: int
    names: tuple[int, int]  # bytes of names in extended headers, which have no checksum


class Change(NamedTuple):
    """What was done to the bytes of a tar."""

    what: str
    start: int  # the first byte that is another one
    stop: int  # the first byte behind it that is not


class Known(NamedTuple):
    """A tar of which it is known what was in it before it was changed."""

    data: bytes
    whole: bytes  # before the changes
    parts: list[Part]
    changes: list[Change]

    def __repr__(self) -> str:
        return f"{len(self.data)} bytes of {len(self.whole)}, {self.changes}"

    def counts(self, before: int) -> Counter[str]:
        """Count the members that are no part of a sample and begin before a byte."""
        kinds = Counter(p.kind for p in self.parts if p.start < before)
        return Counter({kind: n for kind, n in kinds.items() if kind not in ("image", "sibling", "end")})

    def joined(self) -> int:
        """Return how many archives follow another one."""
        return sum(p.kind == "end" for p in self.parts) - 1


class _Builder:
    def __init__(self, random: Random) -> None:
        self.random, self.data, self.parts = random, bytearray(), list[Part]()

    def add(self, kind: str, key: str, name: str, data: bytes, flag: bytes = b"0") -> None:
        start, plain = len(self.data), name.encode()
        if len(plain) > 100 or self.random.random() < 0.15:
            long = pax((b"path", plain)) if self.random.random() < 0.5 else member(b"long", plain + b"\0", b"L")
            self.data += long
            plain = b"cut"  # what it is called where the extended header is lost
        names = (min(start + BLOCK, len(self.data)), len(self.data))
        at = len(self.data) + BLOCK
        self.data += header(plain, len(data), flag) + padded(data)
        self.parts.append(Part(kind, key, start, at, len(data), len(self.data), names))

    def end(self, base: int) -> None:
        start = len(self.data)
        fill = -(start + 2 * BLOCK - base) % RECORD
        self.data += bytes(self.random.choice([BLOCK, 2 * BLOCK, 2 * BLOCK, 2 * BLOCK + fill, 2 * BLOCK + fill]))
        self.parts.append(Part("end", "", start, start, 0, len(self.data), (0, 0)))

    def sample(self, number: int) -> None:
        key = f"{self.random.choice(FOLDERS)}s{number:03d}"
        files = [("jpg", picture(number % 40)), ("cls", b"%d" % (number % 10)), ("json", b'{"a": 1}'), ("txt", b"")]
        files = files[: self.random.randint(1, 4)]
        self.random.shuffle(files)
        for extension, data in files:
            self.add("image" if extension == "jpg" else "sibling", key, f"{key}.{extension}", data)

    def other(self) -> None:
        folder = self.random.choice(FOLDERS)
        match self.random.randrange(8):
            case 0 | 1:
                self.add("hidden file", "", f"{folder}._s000.jpg", b"\0\5\x16\7" * self.random.choice([1, 40, 200]))
            case 2:
                self.add("hidden file", "", f"{folder}.jpg", picture(3))
            case 3:
                self.add("extensionless file", "", f"{folder}README", b"words")
            case _:
                flag = self.random.choice(list(KINDS))
                self.add(KINDS[flag], "", f"{folder}other.jpg", b"xyz" * 30 if flag == b"V" else b"", flag)


@functools.cache
def picture(number: int) -> bytes:
    """Return the bytes of an image; some end in zeros, as an uncompressed one that is black there does."""
    return jpeg(number) + bytes(700 if number % 13 == 5 else 0)


def intact(random: Random) -> Known:
    """Draw a tar: one to three archives of samples and of other members."""
    build, number = _Builder(random), 0
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        base = len(build.data)
        for _ in range(random.randint(1, 14)):
            if random.random() < 0.25:
                build.other()
            else:
                build.sample(number)
                number += 1
        build.end(base)
    return Known(bytes(build.data), bytes(build.data), build.parts, [])


def changed(random: Random) -> Known:
    """Draw a tar with one to three changes, or without any."""
    known = intact(random)
    for _ in range(random.choice([0, 1, 1, 1, 1, 2, 3])):
        if known.data:
            known = random.choice(CHANGES)(random, known)
    return known


def cut(random: Random, known: Known) -> Known:
    """End it early: anywhere, or where a member begins."""
    at = _place(random, known, 0)
    return known._replace(data=known.data[:at], changes=[*known.changes, Change("cut", at, len(known.whole))])


def zeros(random: Random, known: Known) -> Known:
    """Overwrite a range, or all up to the end, as of a download that stopped or a part that is lost."""
    start = _place(random, known, 0)
    length = random.choice([1, BLOCK, 2 * BLOCK, random.randint(1, 4096), random.randint(1, 65536)])
    stop = random.choice([start + length, _place(random, known, start), len(known.data)])
    return _overwrite(known, "zeros", start, bytes(min(stop, len(known.data)) - start))


def flip(random: Random, known: Known) -> Known:
    """Change one bit, but not of a name in an extended header: nothing in the format would tell."""
    at = random.choice([random.randrange(len(known.data)), _place(random, known, 0)])
    if random.random() < 0.7:  # in a header
        at = min(random.choice(known.parts).data - random.randint(1, BLOCK), len(known.data) - 1)
    if not 0 <= at < len(known.data) or any(p.names[0] <= at < p.names[1] for p in known.parts):
        return known
    return _overwrite(known, "flip", at, bytes([known.data[at] ^ 1 << random.randrange(8)]))


def append(random: Random, known: Known) -> Known:
    """Put something behind it that is no tar."""
    junk = random.choice([b"\n", random.randbytes(700), b"x" * BLOCK, bytes(BLOCK), bytes(30_000), b"\x1f\x8b" * 400])
    at = len(known.data)
    return known._replace(data=known.data + junk, changes=[*known.changes, Change("append", at, at + len(junk))])


CHANGES: list[Callable[[Random, Known], Known]] = [cut, cut, zeros, zeros, zeros, flip, append]


def _place(random: Random, known: Known, least: int) -> int:
    """Draw a byte from `least` on: any, or one where a header or data begin or end, or a block."""
    edges = [e for p in known.parts for e in (p.start, p.data, p.data + p.size, p.stop)]
    at = random.choice([random.randint(0, len(known.data)), random.choice(edges)])
    at = at // BLOCK * BLOCK if random.random() < 0.2 else at
    return min(max(at, least), len(known.data))


def _overwrite(known: Known, what: str, start: int, new: bytes) -> Known:
    data = known.data[:start] + new + known.data[start + len(new) :]
    return known._replace(data=data, changes=[*known.changes, Change(what, start, start + len(new))])
