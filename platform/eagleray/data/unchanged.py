"""Notices that local files have changed since they were indexed, by reading files whose times differ.

An index has a checksum of every local tar and image, and a stamp with the times of its last changes. A file with the
same stamp is not read. A file with another stamp, such as a copy on another machine, is read once: if it has the
indexed content, this machine remembers that in its cache."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pyarrow as pa

from eagleray.data.checksum import crc32
from eagleray.data.index_file import File, name
from eagleray.data.kinds import as_in, kind_of
from eagleray.data.stamps import Stamp, Verified, short
from eagleray.storage import store
from eagleray.storage.blob import Blob

WHOLE = "crc32"  # beginning of a tag that is the checksum of all bytes of a file
READ = 4 * 2**20  # bytes in memory at a time
THREADS = 8  # files read concurrently
MUCH = 2**30  # bytes above which reading shards again is announced


def content_tag(blob: Blob) -> str:
    """Return a tag with the checksum of all bytes of a local file. Raises UserError and Outage of the disk."""
    return f"{WHOLE}:{_checksum(blob, 0, blob.size):08x}"


def tagged(
    blobs: Sequence[Blob], known: Mapping[str, File], now: Mapping[str, Stamp], folder: str, note: Callable[[str], None]
) -> tuple[list[Blob], bool]:
    """Return the tars of a local folder with their tags, and whether one was read again because of its stamp.

    A tar in the index keeps its tag there unless it has changed. A new tar has no tag. `now` has all stamps by name."""
    entries = {blob: known[name(blob)].entry(name(blob)) for blob in blobs if name(blob) in known}
    same_size = {blob: entry for blob, entry in entries.items() if entry.size == blob.size}
    others = [blob for blob, entry in same_size.items() if not now[name(blob)].fits(entry.stamp)]
    verified = Verified(folder if others else None)
    marks = {blob: _mark(replace(blob, tag=entries[blob].tag), now[name(blob)]) for blob in others}
    doubtful = [blob for blob in others if marks[blob] not in verified]
    if sum(blob.size for blob in doubtful) > MUCH:
        note(f"reading {len(doubtful)} shards of {folder} again: their files have other times than those indexed")
    with ThreadPoolExecutor(THREADS) as pool:
        found = dict(
            zip(doubtful, pool.map(lambda b: _tag_now(b, entries[b].tag, known[name(b)]), doubtful), strict=True)
        )
    verified.add(marks[blob] for blob, tag in found.items() if tag == entries[blob].tag)
    tags = {blob: entry.tag for blob, entry in same_size.items()} | found
    tags |= {blob: store.store(blob.url).tag(blob) for blob in entries.keys() - tags.keys()}
    return [replace(blob, tag=tags.get(blob, "")) for blob in blobs], bool(doubtful)


def remember(folder: str, shards: Iterable[tuple[Blob, Stamp]]) -> None:
    """Remember that the tars of a local folder have the content that their tags stand for."""
    Verified(folder).add(_mark(blob, stamp) for blob, stamp in shards)


def _mark(blob: Blob, stamp: Stamp) -> int:
    return short(name(blob), blob.size, stamp, blob.tag)


def _tag_now(blob: Blob, tag: str, file: File) -> str:
    """Return `tag`, a shard's tag in the index, if its content is still as indexed, otherwise another tag."""
    if tag.startswith(f"{WHOLE}:"):
        return content_tag(blob)
    rows = file.read(file.groups[name(blob)], ["offset", "size", "crc"])  # checked, as the index may come from a bucket
    if (entry := file.entry(name(blob))).parquet:
        found = kind_of(blob).scan(as_in(blob, entry))["crc"].drop_null()
        return tag if found.equals(rows["crc"].slice(0, entry.usable)) else content_tag(blob)
    for offset, size, crc in zip(*(column.to_pylist() for column in rows.columns), strict=True):
        if crc is not None and offset >= 0 and _checksum(blob, offset, size) != crc:
            return content_tag(blob)
    return tag


def images_tag(rows: pa.Table) -> str:
    """Return the tag of a part of a local folder: a digest of its images' paths, sizes, checksums and labels."""
    digest = hashlib.sha256()
    for values in zip(*(rows[column].to_pylist() for column in ("key", "size", "crc", "label")), strict=True):
        digest.update(repr(values).encode())
    return f"files:{digest.hexdigest()[:16]}"


def _checksum(blob: Blob, start: int, size: int) -> int:
    """Return the CRC-32 of some bytes of a local file, with only a part in memory at a time."""
    crc = 0
    for at in range(start, start + size, READ):
        crc = crc32(store.store(blob.url).read(blob.url, at, min(READ, start + size - at)), crc)
    return crc
