"""The kinds of shards, told apart by their names: how a shard is scanned, and how its images are read.

Images have ascending offsets: positions in a tar, or the positions that the images of a folder or of a Parquet file
would have if they were stored one after the other. `read` returns the bytes of neighbouring images, from the start of
the first to the end of the last. All other code (blocks, lanes, cache, quarantine) does not depend on the kind."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from eagleray.base.errors import UserError
from eagleray.config.source import Source
from eagleray.data import image_folder, index_file
from eagleray.data.image_folder import Each
from eagleray.data.index_schema import Shard
from eagleray.data.tar_scan import scan
from eagleray.storage import store
from eagleray.storage.blob import Blob
from eagleray.storage.ordered_map import ordered_map
from eagleray.storage.shard_names import PARQUET, is_parquet

NONE = "none"  # given instead of a column's name if labels are not to be read


class Rows(NamedTuple):
    """n neighbouring samples of one shard."""

    blob: Blob
    offset: NDArray[np.int64]  # (n,) first byte of each image in the shard
    size: NDArray[np.int64]  # (n,) bytes of each image
    label: NDArray[np.int64]  # (n,) class, or -1 without a label
    crc: NDArray[np.uint32]  # (n,) checksum of each image


@dataclass(frozen=True)
class Means:
    """The input of `Kind.read` beside the rows: the shard's entry in the index, the keys and the limits of requests."""

    shard: Shard  # entry in the shard's index
    keys: Callable[[], list[str]]  # reads the keys of the samples in the rows from the index
    patience: float  # seconds to retry while the store does not answer
    each: Each = ordered_map  # maps a function over separate requests, several at once, and keeps the order
    stale: Any = None  # unpacked images of a Parquet file's block that are wrong, and must not be used again


@dataclass(frozen=True)
class Kind:
    """The functions that scan and read the shards of one kind."""

    owns: Callable[[str], bool]  # whether a shard of this name is of this kind
    scan: Callable[[Blob], pa.Table]  # returns a table like `index_file.table_of`
    read: Callable[[Rows, Means], memoryview]
    apart: bool = False  # whether each image is read with a request of its own
    whole: bool = False  # whether an image costs as much to read as its block


def byte_range(rows: Rows) -> tuple[int, int]:
    """Return where the first image begins and the last image ends, in bytes from the start of the shard."""
    return int(rows.offset[0]), int(rows.offset[-1] + rows.size[-1])


def _scan_tar(blob: Blob) -> pa.Table:
    passed = Counter[str]()
    return index_file.table_of(scan(blob, passed), passed)


def _read_tar(rows: Rows, means: Means) -> memoryview:
    (begin, end), url = byte_range(rows), rows.blob.url
    return store.store(url).read(url, begin, end - begin, tag=rows.blob.tag, patience=means.patience)


def _read_images(rows: Rows, means: Means) -> memoryview:
    folder = image_folder.address(rows.blob)
    return image_folder.read_files(folder, means.keys(), rows.size.tolist(), means.patience, means.each)


def _scan_parquet(blob: Blob) -> pa.Table:
    from eagleray.data import parquet_shard

    return parquet_shard.scan(blob)


def _read_parquet(rows: Rows, means: Means) -> memoryview:
    from eagleray.data import parquet_shard

    return parquet_shard.read(rows.blob, means.shard.parquet, *byte_range(rows), means.patience, means.stale)


def _scan_images(blob: Blob) -> pa.Table:
    raise AssertionError("the images of a folder are indexed by folder_index")


TAR = Kind(lambda _: True, _scan_tar, _read_tar)
KINDS = (  # the first kind that owns a shard's name is taken
    Kind(image_folder.is_part, _scan_images, _read_images, apart=True),
    Kind(lambda name: name.lower().endswith(PARQUET), _scan_parquet, _read_parquet, whole=True),
    TAR,
)


def kind_of(blob: Blob) -> Kind:
    """Return the kind of a shard."""
    name = index_file.name(blob)
    return next(kind for kind in KINDS if kind.owns(name))


@dataclass(frozen=True, slots=True)
class ChosenBlob(Blob):
    """A Parquet file for which the user has named the columns of the images and the classes."""

    image: str = ""  # column of the images; empty: not named
    label: str = ""  # column of the classes; empty: not named


def chosen(blobs: Sequence[Blob], source: Source) -> list[Blob]:
    """Return the files of a source with the columns that the source names. Raises UserError if one is not Parquet."""
    if not (source.image or source.label):
        return list(blobs)
    if wrong := [b.url for b in blobs if not is_parquet(b.url, ".")]:
        raise UserError(f"{source.url}: image and label name columns of Parquet files, and {wrong[0]} is none")
    return [ChosenBlob(b.url, b.size, b.tag, source.image or "", source.label or "") for b in blobs]


def as_before(blobs: Sequence[Blob], known: Mapping[str, index_file.File]) -> list[Blob]:
    """Return the files. New files without named columns get the columns of the first Parquet file in the index."""
    entries = (file.entry(name) for name, file in known.items())
    before = next((entry for entry in entries if entry.parquet), None)
    return [as_in(b, before) if before and type(b) is Blob and index_file.name(b) not in known else b for b in blobs]


def as_in(blob: Blob, entry: Shard) -> Blob:
    """Return a file with the columns of an index entry."""
    known = entry.parquet or {"image": "", "label": ""}
    return ChosenBlob(blob.url, blob.size, blob.tag, known["image"], known["label"] or NONE)


def check_columns(blob: Blob, entry: Shard) -> None:
    """Raises UserError when a file is indexed with other columns than those that the user has named."""
    for key in ("image", "label") if isinstance(blob, ChosenBlob) and entry.parquet else ():
        said, known = getattr(blob, key), (entry.parquet or {})[key] or NONE
        if said and said != known:
            again = f"`eagleray index {store.parent(blob.url)} --{key} {said}`"
            raise UserError(f"{blob.url}: is indexed with {key}={known}; {again} reads it again")
