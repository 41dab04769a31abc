"""Keep the growing files of a run in a store in parts, so that what is sent does not grow with the run.

A part is named by its file, the epoch of its writer's lease and the byte at which it begins, such as
`metrics.jsonl-e000002-000000131072`. From its first byte on it takes the place of all parts of earlier epochs: a writer
that has lost the run changes nothing that its successor has sent, and lines that a start drops are gone with its first
part. A file under its plain name is of a run begun before there were parts: it counts as a part of epoch 0.
"""

import os
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from eagleray.runs import layout
from eagleray.storage import store
from eagleray.storage.blob import Blob
from eagleray.storage.ordered_map import ordered_map

PART = 2**17  # bytes at most of a part that this version writes
GROWING = {layout.LOG, layout.METRICS, layout.STEPS, layout.HEALTH}
GROWING |= {layout.QUARANTINE, layout.SKIPPED, layout.STARTS}
NAMED = re.compile(r"(.+?)(?:-e(\d+)-(\d+))?")


@dataclass(frozen=True)
class Part:
    """A file in the store that holds a history from byte `start` on."""

    name: str  # of the history
    epoch: int
    start: int
    blob: Blob

    @property
    def end(self) -> int:
        return self.start + self.blob.size


def part_of(blob: Blob) -> Part | None:
    """Return what a file in a run's folder is a part of, or None."""
    match = NAMED.fullmatch(blob.url.rpartition("/")[2])
    return Part(match[1], int(match[2] or 0), int(match[3] or 0), blob) if match and match[1] in GROWING else None


class History:
    """A growing file as a listing of the store shows it."""

    def __init__(self, parts: Iterable[Part]) -> None:
        self.parts, self.replaced = list[Part](), list[Part]()  # those that count, and those that no longer do
        for part in sorted(parts, key=lambda p: (p.epoch, p.start)):
            while self.parts and self.parts[-1].start >= part.start:
                self.replaced.append(self.parts.pop())
            self.parts.append(part)
        ends = [*(after.start for after in self.parts[1:]), self.parts[-1].end]
        self.lengths = [min(p.blob.size, end - p.start) for p, end in zip(self.parts, ends, strict=True)]
        self.size, self.end = sum(self.lengths), self.parts[-1].end
        self.tag = [(p.blob.url, p.blob.tag) for p in self.parts]

    @property
    def whole(self) -> int:
        """Return up to which byte nothing is missing: a request that a server carries out late may shorten a part."""
        gaps = (before.end for before, after in pairwise(self.parts) if before.end < after.start)
        return 0 if self.parts[0].start else next(gaps, self.end)

    def read(self, start: int = 0) -> bytes:
        """Return the content from a byte on. Raises UserError when a part has gone since it was listed, and Outage."""
        wanted, at = list[tuple[str, int, int]](), 0
        for part, length in zip(self.parts, self.lengths, strict=True):
            if (skipped := max(start - at, 0)) < length:
                wanted.append((part.blob.url, skipped, length - skipped))
            at += length
        return b"".join(ordered_map(lambda one: bytes(store.store(one[0]).read(*one)), wanted))


def histories(blobs: Iterable[Blob]) -> dict[str, History]:
    """Return the histories among the files of a run's folder by their names."""
    parts = defaultdict[str, list[Part]](list)
    for part in filter(None, map(part_of, blobs)):
        parts[part.name].append(part)
    return {name: History(found) for name, found in parts.items()}


def exists(out: str, name: str) -> bool:
    """Return whether a run in a folder or in a store has a history of this name."""
    if not store.is_remote(out):
        return (store.local_path(out) / name).exists()
    return name in histories(store.store(out).list(f"{out}/", name))


def append(out: str, name: str, text: str) -> None:
    """Append text to a history of a remote run whose ranks have ended."""
    history = histories(store.store(out).list(f"{out}/", name)).get(name)
    last = history.parts[-1].epoch if history else 0
    store.put_bytes(part_url(out, name, last, history.end if history else 0), text.encode())


def part_url(out: str, name: str, epoch: int, start: int) -> str:
    return f"{out}/{name}-e{epoch:06d}-{start:012d}"


def checksums(path: Path, size: int) -> list[int]:
    """Return a checksum of each part that lies wholly in the first bytes of a file."""
    with path.open("rb") as file:
        return [zlib.crc32(file.read(PART)) for _ in range(size // PART)]


class Upload:
    """Brings a growing file up to date in the store, by the parts that have changed.

    Parts begin at multiples of PART, and the last one is sent whenever it has grown. A process that stops between two
    requests leaves the beginning of the file in the store, with nothing missing or doubled.
    """

    def __init__(self, out: str, name: str, epoch: int, sums: Sequence[int] = ()) -> None:
        """`sums` are the checksums of the parts that are in the store already. The last part is not among them: that
        it is sent by every start makes those void that an earlier writer may send late."""
        self.out, self.name, self.epoch, self.sums = out, name, epoch, list(sums)
        self.own = list[int]()  # numbers of the parts of this epoch
        self.inode, self.size = 0, -1  # of the local file, when it was read

    def send(self, path: Path, put: Callable[[str, bytes], None], delete: Callable[[str], None]) -> int:
        """Send what is new in a local file, but for a half line at its end, and return the number of bytes."""
        with path.open("rb") as file:
            stat = os.fstat(file.fileno())
            grown = stat.st_ino == self.inode and stat.st_size >= self.size  # a start that drops lines replaces it
            first = len(self.sums) - 1 if grown else 0
            file.seek(first * PART)
            data = file.read()
        data = data[: data.rfind(b"\n") + 1]
        parts = [data[at : at + PART] for at in range(0, len(data) + 1, PART)]
        del self.sums[first + len(parts) :]
        while self.own and self.own[-1] >= first + len(parts):  # of lines that were dropped
            delete(self._url(self.own[-1]))
            self.own.pop()
        sent = 0
        for number, part in enumerate(parts, first):
            if self.sums[number : number + 1] != [crc := zlib.crc32(part)]:
                put(self._url(number), part)
                self.sums[number:] = [crc]  # the parts of earlier epochs after it no longer count
                self.own += [number] * (number not in self.own[-1:])
                sent += len(part)
        self.inode, self.size = stat.st_ino, first * PART + len(data)
        return sent

    def _url(self, number: int) -> str:
        return part_url(self.out, self.name, self.epoch, number * PART)
