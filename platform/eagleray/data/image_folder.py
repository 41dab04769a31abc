"""Indexes and reads a local folder of images as if all its files, one after the other, were one shard.

The files are ordered by a hash of their paths. Neighbours are read together, and in the order of names most neighbours
would be of one class.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import pyarrow as pa

from eagleray.base.errors import UserError
from eagleray.data.checksum import crc32
from eagleray.data.file_names import from_text, readable
from eagleray.data.pixels import HEIC_EXTENSIONS, NO_HEIC, image_extensions
from eagleray.data.stamps import Stamp, settle, stamp_of_all
from eagleray.data.tar_scan import LARGEST, READ, Row
from eagleray.storage import store
from eagleray.storage.blob import Blob, new_buffer
from eagleray.storage.local_files import files_below
from eagleray.storage.ordered_map import ordered_map
from eagleray.storage.shard_names import is_shard

NAME = "."  # the folder's own name as a shard of its index
KINDS = 5  # extensions of unread files that are named


class Listing(NamedTuple):
    """The images in a folder and in all folders below it."""

    sizes: dict[str, int]  # bytes, by relative path, in reading order
    stamps: dict[str, Stamp]
    others: Counter[str]  # files that are not read, by extension with its dot; hidden ones are not counted

    @property
    def stamp(self) -> Stamp:
        """Return what tells that an image was written, comes or goes."""
        return stamp_of_all((f"{size} {path}", self.stamps[path]) for path, size in self.sizes.items())

    def unread(self) -> str:
        """Say how many files are not read, by extension; an empty string if there are none."""
        return said(self.others)


def said(others: Counter[str]) -> str:
    """Say how many files there are of each extension; an empty string if there are none."""
    kinds = sorted(others.items(), key=lambda item: (-item[1], item[0]))
    more = sum(n for _, n in kinds[KINDS:])
    return ", ".join([f"{n} {_named(kind)}" for kind, n in kinds[:KINDS]] + [f"{more} more"] * bool(more))


def extension(path: str) -> str:
    """Return the extension of a file that is not read, as a message names it."""
    return readable(os.path.splitext(path)[1].lower()[:20]) or "without extension"


def _named(kind: str) -> str:
    return f"{kind} ({NO_HEIC})" if kind[1:] in HEIC_EXTENSIONS else kind


def is_folder_blob(blob: Blob) -> bool:
    return blob.url.endswith(f"/{NAME}")


def address(blob: Blob) -> str:
    """Return the address that messages show for a shard: its URL or, for a folder of images, the folder."""
    return blob.url.removesuffix(f"/{NAME}")


def holds_images(folder: str) -> bool:
    """Return whether this is a local folder with images in it or below it, and without tars."""
    root = store.folder_of(folder)
    if root is None or not root.is_dir():
        return False
    if any(is_shard(entry.name) and not entry.is_dir() for entry in os.scandir(root)):
        return False
    return any(_is_image(path) for path in files_below(root, hidden=False))


def list_images(folder: str) -> Listing:
    """List the images in a folder and in all folders below it. Raises UserError when a folder cannot be listed."""
    root, sizes, others, stamps = store.local_path(folder), {}, Counter[str](), dict[str, Stamp]()
    for path in files_below(root, hidden=False):
        if not _is_image(path):
            if path != "index.parquet":
                others[extension(path)] += 1
            continue
        try:
            status = os.stat(root / path)
            sizes[path], stamps[path] = status.st_size, Stamp.of(status)
        except OSError:  # a broken link, or a file that went away meanwhile
            others["gone or a broken link"] += 1
    settle(stamps.values())
    return Listing({path: sizes[path] for path in sorted(sizes, key=_order)}, stamps, others)


def blob_of(folder: str, listing: Listing) -> Blob:
    """Describe a folder of images as one shard, without a tag."""
    return Blob(f"{folder}/{NAME}", sum(listing.sizes.values()))


def difference(table: pa.Table, listing: Listing) -> str:
    """Describe the first indexed file that is gone or has another size; an empty string if there is none.

    Files that are not in the index are ignored.
    """
    for path, size in _sizes(table).items():
        if path not in listing.sizes:
            return f"{readable(path)}: is gone"
        if listing.sizes[path] != size:
            return f"{readable(path)}: has changed"
    return ""


def scan_folder(folder: str, listing: Listing, known: pa.Table | None) -> Iterator[Row]:
    """Yield a row for every image of a folder.

    Every image is read once for its checksum, unless the table `known` has its checksum already.
    """
    labels = class_labels(listing.sizes)
    rows = {from_text(row["key"]): row for row in known.to_pylist()} if known is not None else {}
    end = 0
    for path, (crc, reason) in ordered_map(
        lambda path: (path, _known(rows.get(path)) or _checksum(folder, path, listing.sizes[path])), listing.sizes
    ):
        size, label = listing.sizes[path], labels.get(path.partition("/")[0], -1)
        yield Row(path, -1 if reason else end, size, label, crc, reason)
        end += 0 if reason else size


def class_labels(paths: Mapping[str, int]) -> dict[str, int]:
    """Return a class number for each folder directly below the listed one.

    Nothing is returned if there is only one such folder, or if an image lies in none of them.
    """
    tops = {path.partition("/")[0] if "/" in path else "" for path in paths}
    return {top: number for number, top in enumerate(sorted(tops))} if "" not in tops and len(tops) > 1 else {}


def read_files(folder: str, paths: Sequence[str], sizes: Sequence[int], patience: float) -> memoryview:
    """Return the bytes of some files, one after the other; `paths` are texts of an index.

    A file that is gone or has become too short is filled with zeros. Their checksum is wrong, so the file counts as a
    broken sample and does not stop the run.
    """
    data, at = new_buffer(sum(sizes)), 0
    for path, size in zip(map(from_text, paths), sizes, strict=True):
        url = f"{folder}/{path}"
        if ".." in path.split("/") or "\0" in path:  # an index of a stranger
            raise UserError(f"{folder}: its index has an image outside of the folder: {readable(path)}")
        try:
            data[at : at + size] = store.store(url).read(url, 0, size, patience=patience)
        except UserError:
            data[at : at + size] = bytes(size)
        at += size
    return data


def _is_image(path: str) -> bool:
    return path.rpartition("/")[2].rpartition(".")[2].lower() in image_extensions()


def _order(path: str) -> tuple[bytes, str]:
    return hashlib.md5(path.encode(errors="surrogateescape"), usedforsecurity=False).digest(), path


def _sizes(table: pa.Table) -> dict[str, int]:
    return dict(zip(map(from_text, table["key"].to_pylist()), table["size"].to_pylist(), strict=True))


def _known(row: Mapping[str, int] | None) -> tuple[int, None] | None:
    return (row["crc"], None) if row and row["reason"] is None else None


def _checksum(folder: str, path: str, size: int) -> tuple[int | None, str | None]:
    """Return the checksum of a file, or why it cannot be used. Only a part of the file is in memory at a time."""
    if size == 0:
        return None, "the image has no bytes"
    if size > LARGEST:
        return None, f"the image has {size} bytes, more than {LARGEST}"
    url, crc = f"{folder}/{path}", 0
    try:
        for at in range(0, size, READ):
            crc = crc32(store.store(folder).read(url, at, min(READ, size - at)), crc)
        return crc, None
    except UserError as e:
        return None, str(e).removeprefix(f"{url}: ")
