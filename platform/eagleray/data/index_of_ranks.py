"""Opens an index on all ranks of a run: rank 0 lists and checks the shards, and the other ranks receive its result.

Every rank opens the index files itself. A file in a bucket is fetched once per machine. If a machine cannot reach a
file, such as rank 0's local index of a read-only bucket, rank 0 sends it."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from eagleray.base import dist, files
from eagleray.data.index import Index
from eagleray.data.index_file import File, fetch_once
from eagleray.storage.store import folder_of

TAIL = 2**16  # bytes at the end of an index file, with the metadata of all shards, from which its stamp is computed


@dataclass(frozen=True)
class FileNote:
    """Tells other ranks where rank 0 has an index file, and by which stamp another machine recognises the same file."""

    url: str
    path: Path
    stamp: str

    @classmethod
    def of(cls, file: File) -> "FileNote":
        return cls(file.url, file.path, stamp(file.path))

    def here(self) -> File | None:
        """Return the file on this machine, or None if it is missing. A file in a bucket is fetched."""
        if not folder_of(self.url):
            return File(fetch_once(self.url, self.path.name), self.url)
        for path in (self.path, self.received):
            if path.exists() and stamp(path) == self.stamp:
                return File(path, self.url)
        return None

    @property
    def received(self) -> Path:
        """The path of the copy that rank 0 sends."""
        return files.cache_folder("index") / f"{self.stamp}.parquet"

    def receive(self, content: bytes) -> None:
        """Write the content that rank 0 has sent, once per machine."""
        self.received.parent.mkdir(parents=True, exist_ok=True)
        with files.file_lock(self.received.with_suffix(".lock")):
            if not self.received.exists():
                files.write_atomic(self.received, content)


def stamp(path: Path) -> str:
    """Return a text that differs between index files with different metadata."""
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(size - TAIL, 0))
        return f"{size}-{zlib.crc32(file.read()):08x}"


def open_on_all(open_here: Callable[[], Index]) -> Index:
    """Open an index with `open_here` on rank 0, and return it on all ranks, which call this together.

    Raises on all ranks the UserError or Outage that `open_here` raises on rank 0."""
    if dist.size() == 1:
        return open_here()
    own: list[Index] = []

    def described() -> tuple[Index, list[FileNote], list[int]]:
        own.append(open_here())
        distinct = list(dict.fromkeys(own[0].files))
        which = {file: n for n, file in enumerate(distinct)}
        return replace(own[0], files=[]), [FileNote.of(f) for f in distinct], [which[f] for f in own[0].files]

    index, notes, numbers = dist.from_rank_zero(described)
    found = [note.here() for note in notes]
    missing = dist.gather_objects([number for number, file in enumerate(found) if file is None])
    for number in sorted(set().union(*missing)):
        content = dist.from_rank_zero(notes[number].path.read_bytes)
        if found[number] is None:
            notes[number].receive(content)
            found[number] = notes[number].here()
    opened = [file for file in found if file]
    return own[0] if own else replace(index, files=[opened[n] for n in numbers])
