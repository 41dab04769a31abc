"""Keep the growing files of a run in a store in parts, so that what is sent does not grow with the run.

A part is named by its file, the epoch of its writer's lease and the byte at which it begins, such as
`metrics.jsonl-e000002-000000131072`. From its first byte on it takes the place of all parts of earlier epochs: a writer
that has lost the run changes nothing that its successor has sent, and lines that a start drops are gone with its first
part.
"""

import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from eagleray.runs import layout
from eagleray.storage import store
from eagleray.storage.blob import Blob
from eagleray.storage.ordered_map import ordered_map

PART = 2**17  # bytes of a part, but for the last one, which is written again when there is more
GROWING = {layout.LOG, layout.METRICS, layout.STEPS, layout.HEALTH}
GROWING |= {layout.QUARANTINE, layout.SKIPPED, layout.STARTS}
NAMED = re.compile(r"(.+)-e(\d+)-(\d+)")


@dataclass(frozen=True)
class Part:
    """A file in the store that holds a history from byte `start` on."""

    epoch: int
    start: int
    blob: Blob

    @property
    def end(self) -> int:
        return self.start + self.blob.size


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
    for blob in blobs:
        if (match := NAMED.fullmatch(blob.url.rpartition("/")[2])) and match[1] in GROWING:
            parts[match[1]].append(Part(int(match[2]), int(match[3]), blob))
    return {name: History(found) for name, found in parts.items()}


def part_url(out: str, name: str, epoch: int, start: int) -> str:
    return f"{out}/{name}-e{epoch:06d}-{start:012d}"


class Upload:
    """Brings a growing file up to date in the store.

    Only its last part is sent again when there is more. The first part of a start begins where the file differs from
    what is in the store, at the latest with the last part that is there: so parts are void that an earlier writer may
    send late. A process that stops between two requests leaves the beginning of the file in the store, with nothing
    missing or doubled.
    """

    def __init__(self, out: str, path: Path, epoch: int, whole: int = 0) -> None:
        """The first `whole` bytes of the file are in the store. It loses lines before the first `send` alone."""
        self.out, self.path, self.epoch = out, path, epoch
        self.start = self.size = -1  # the last part begins at `start`, and `size` bytes of the file were sent
        self.stored = _checksums(path, whole)

    def send(self, put: Callable[[str, bytes], None]) -> None:
        """Send what is new in the file, but for a half line at its end."""
        if self.start < 0:
            pairs = zip(self.stored, _checksums(self.path, self.path.stat().st_size), strict=False)
            self.start = PART * next((n for n, (one, other) in enumerate(pairs) if one != other), len(self.stored))
            self.start = min(self.start, self.path.stat().st_size // PART * PART)
        with self.path.open("rb") as file:
            file.seek(self.start)
            data = file.read()
        data = data[: data.rfind(b"\n") + 1]
        while self.start + len(data) != self.size:
            put(part_url(self.out, self.path.name, self.epoch, self.start), data[:PART])
            if len(data) < PART:
                self.size = self.start + len(data)
            else:
                self.start, data = self.start + PART, data[PART:]


def _checksums(path: Path, size: int) -> list[int]:
    """Return a checksum of each part that lies wholly in the first bytes of a file."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        return [zlib.crc32(file.read(PART)) for _ in range(size // PART)]
