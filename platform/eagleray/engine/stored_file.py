"""Checks the files of a checkpoint against its manifest, and copies them from a store."""

import contextlib
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eagleray.base.errors import UserError
from eagleray.base.files import atomic_path
from eagleray.engine.serialise import sha256
from eagleray.storage.blob import Blob
from eagleray.storage.ordered_map import ordered_map
from eagleray.storage.store import store

PIECE = 8 * 2**20  # bytes read from a store at a time
WIDTH = 4  # pieces that are read at once
METADATA = ".metadata"  # this file of a sharded checkpoint describes the rows in the others
SHARD_FILE = re.compile(r"__\d+_\d+\.distcp")  # the rows of one rank
SHA256 = re.compile("[0-9a-f]{64}")


def parse_manifest(text: bytes) -> dict[str, Any] | None:
    """Return the content of a manifest, or None when the text is not a manifest of eagleray: its names would be those
    of other files."""
    with contextlib.suppress(ValueError, RecursionError):
        manifest = json.loads(text)
        shards: Any = manifest.get("shards", {}) if isinstance(manifest, dict) else None
        files = [manifest, *shards.values()] if isinstance(shards, dict) else [None]
        if all(map(_describes_file, files)) and all(n == METADATA or SHARD_FILE.fullmatch(n) for n in shards):
            return dict(manifest)
    return None


def _describes_file(entry: Any) -> bool:
    """Return whether an entry of a manifest has the size and the checksum of a file."""
    if not isinstance(entry, dict):
        return False
    size, digest = entry.get("bytes"), entry.get("sha256")
    return type(size) is int and size >= 0 and isinstance(digest, str) and bool(SHA256.fullmatch(digest))


class _Damaged(Exception):
    """Raised when a checkpoint does not have the checksum of its manifest."""


def fetch(blob: Blob, path: Path, manifest: dict[str, Any], patience: float) -> bool:
    """Download a checkpoint from its store and return whether it is intact."""
    if blob.size != manifest["bytes"]:
        return False
    hashed = hashlib.sha256()
    path.parent.mkdir(exist_ok=True)
    try:  # not flushed, as the copy is compared with its checksum whenever it is used
        with atomic_path(path, part=path.with_suffix(".part")) as part:
            with part.open("wb") as f:
                for piece in pieces(blob, patience):
                    hashed.update(piece)
                    f.write(piece)
            if hashed.hexdigest() != manifest["sha256"]:
                raise _Damaged
    except _Damaged:
        return False
    except OSError as e:
        raise UserError(f"{path}: cannot be written: {e.strerror}") from None
    return True


def pieces(blob: Blob, patience: float) -> Iterator[memoryview]:
    """Yield the bytes of a stored file in order; some pieces are read ahead."""

    def piece(start: int) -> memoryview:
        return store(blob.url).read(blob.url, start, min(PIECE, blob.size - start), patience=patience)

    return ordered_map(piece, range(0, blob.size, PIECE), width=WIDTH)


def sha256_of(pieces: Iterator[memoryview]) -> str:
    """Return the SHA-256 of bytes in pieces, in hexadecimal digits."""
    out = hashlib.sha256()
    for piece in pieces:
        out.update(piece)
    return out.hexdigest()


def agrees(path: Path, manifest: dict[str, Any]) -> bool:
    """Return whether a local file exists and has the size and checksum of the manifest."""
    try:
        there = path.stat()
        # A device or a pipe would be read without end.
        regular = stat.S_ISREG(there.st_mode) and there.st_size == manifest["bytes"]
        return regular and sha256(path) == manifest["sha256"]
    except OSError:
        return False


def flush(path: Path) -> None:
    """Flush a file to the disk and drop it from the page cache, so that it is read back from the disk."""
    with path.open("rb+") as f:
        os.fsync(f.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
