"""The names of the files of checkpoints, and functions that check, copy and hash these files.

In `step-000000110-e000002`, 2 is the epoch, the number of the run's writer. A run in a local folder, which it locks,
has only one writer, and names without epoch."""

import contextlib
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from eagleray.base.files import writing
from eagleray.storage.blob import Blob
from eagleray.storage.ordered_map import ordered_map
from eagleray.storage.store import store


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def step_name(step: int, epoch: int = 0) -> str:
    """Return the name of the checkpoint of a step, without a file extension."""
    return f"step-{step:09d}" + (f"-e{epoch:06d}" if epoch else "")


def step_of(name: str) -> int:
    """Return the step in the name of a checkpoint."""
    step = re.match(r"step-(\d+)", name)
    return int(step[1]) if step else 0


def epoch_of(name: str) -> int:
    """Return the epoch of the writer in the name of a checkpoint; 0 if the name has none."""
    epoch = re.search(r"-e(\d+)$", name)
    return int(epoch[1]) if epoch else 0


def last_epoch(urls: Iterable[str]) -> int:
    """Return the highest epoch in the URLs of checkpoints, or 0 if there are none."""
    return max((epoch_of(stem(url)) for url in urls), default=0)


def names_in(urls: Iterable[str]) -> list[str]:
    """Return the names of the checkpoints that have a manifest, newest first."""
    return sorted((stem(url) for url in urls if url.endswith(".json")), key=order, reverse=True)


def order(name: str) -> tuple[int, str]:
    """Return the sort key of a checkpoint: the epoch of its writer, then its name, which sorts by step."""
    return epoch_of(name), name


def stem(url: str) -> str:
    """Return the name of the checkpoint that a file belongs to, from its URL; the file may be in a `.shards` folder."""
    return re.findall(r"step-[^/.]*", url)[-1]


PIECE = 8 * 2**20  # bytes read from a store at a time
WIDTH = 4  # pieces read in parallel
METADATA = ".metadata"  # file of a sharded checkpoint that describes the rows in its other files
SHARD_FILE = re.compile(r"__\d+_\d+\.distcp")  # name of a file with the rows of one rank
SHA256 = re.compile("[0-9a-f]{64}")


def parse_manifest(text: bytes) -> dict[str, Any] | None:
    """Return the content of a manifest, or None when the text is not a manifest that eagleray has written. The names of
    shard files are checked as well: any other name could lead to a file outside the checkpoint."""
    with contextlib.suppress(ValueError, RecursionError):
        manifest = json.loads(text)
        shards: Any = manifest.get("shards", {}) if isinstance(manifest, dict) else None
        files = [manifest, *shards.values()] if isinstance(shards, dict) else [None]
        if all(map(_describes_file, files)) and all(n == METADATA or SHARD_FILE.fullmatch(n) for n in shards):
            return dict(manifest)
    return None


def _describes_file(entry: Any) -> bool:
    """Return whether an entry of a manifest has a valid size and SHA-256."""
    if not isinstance(entry, dict):
        return False
    size, digest = entry.get("bytes"), entry.get("sha256")
    return type(size) is int and size >= 0 and isinstance(digest, str) and bool(SHA256.fullmatch(digest))


def fetch(blob: Blob, path: Path, manifest: dict[str, Any], patience: float) -> bool:
    """Download a file of a checkpoint to `path`, and return whether it has the size and SHA-256 in `manifest`."""
    if blob.size != manifest["bytes"]:
        return False
    hashed, part = hashlib.sha256(), path.with_suffix(".part")  # the next writer deletes part files that are left over
    path.parent.mkdir(exist_ok=True)
    with writing(str(path)):  # no flush to disk is needed, as each use compares the checksum
        with part.open("wb") as f:
            for piece in pieces(blob, patience):
                hashed.update(piece)
                f.write(piece)
        if intact := hashed.hexdigest() == manifest["sha256"]:
            part.replace(path)
        part.unlink(missing_ok=True)
    return intact


def pieces(blob: Blob, patience: float) -> Iterator[memoryview]:
    """Yield the bytes of a stored file in order, PIECE at a time. WIDTH pieces are read ahead in parallel."""

    def piece(start: int) -> memoryview:
        return store(blob.url).read(blob.url, start, min(PIECE, blob.size - start), patience=patience)

    return ordered_map(piece, range(0, blob.size, PIECE), width=WIDTH)


def sha256_of(pieces: Iterator[memoryview]) -> str:
    """Return the SHA-256, in hexadecimal digits, of bytes that come in pieces."""
    out = hashlib.sha256()
    for piece in pieces:
        out.update(piece)
    return out.hexdigest()


def agrees(path: Path, manifest: dict[str, Any]) -> bool:
    """Return whether a local file exists and has the size and checksum of the manifest."""
    try:
        there = path.stat()
        # Only regular files are hashed, as reading a device or a pipe may never end.
        regular = stat.S_ISREG(there.st_mode) and there.st_size == manifest["bytes"]
        return regular and sha256(path) == manifest["sha256"]
    except OSError:
        return False


def flush(path: Path) -> None:
    """Flush a file to disk and drop it from the page cache, so that later reads come from the disk."""
    with path.open("rb+") as f:
        os.fsync(f.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
