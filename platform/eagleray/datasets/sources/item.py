"""What every source of images boils down to: items that say where the bytes of an image are."""

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import pyarrow as pa

from eagleray.data.tar_scan import image_extensions
from eagleray.storage.blob import Blob

BATCH = 65_536  # items per chunk of a table


class Item(NamedTuple):
    """One image of a source."""

    key: str
    url: str  # of the file that holds it
    offset: int  # bytes; in a Parquet file the row in its row group
    size: int  # bytes; in a Parquet file about
    extension: str = ""  # lower case; empty: the bytes must say
    label: int = -1
    group: int = -1  # row group of a Parquet file, which is read as a whole; -1 where every image is read by itself
    meta: str | None = None  # JSON
    reason: str | None = None  # why it is dropped


TEXT = pa.large_string()  # plain strings end at 2 GiB in one piece
SCHEMA = pa.schema(
    [
        ("key", TEXT),
        ("url", TEXT),
        ("offset", pa.int64()),
        ("size", pa.int64()),
        ("extension", pa.string()),
        ("label", pa.int64()),
        ("group", pa.int64()),
        ("meta", TEXT),
        ("reason", TEXT),
    ]
)


@dataclass(frozen=True)
class Listing:
    items: Iterable[Item]  # in an order that depends on the source alone
    classes: Sequence[str] = ()  # names, in the order of the labels


@dataclass(frozen=True)
class Found:
    """A source that has been looked at, and not yet listed."""

    files: Sequence[Blob]  # everything that is read: who finds the same files finds the same items
    listing: Callable[[], Listing]  # may read all headers of all archives
    column: str = ""  # of the images, where the files are Parquet


def table(items: Iterable[Item]) -> pa.Table:
    """Items as columns; 14 million Python objects would not fit everybody's memory."""
    batches = []
    stream = iter(items)
    while batch := list(itertools.islice(stream, BATCH)):
        columns = [pa.array(c, f.type) for c, f in zip(zip(*batch, strict=True), SCHEMA, strict=True)]
        batches.append(pa.record_batch(columns, schema=SCHEMA))
    return pa.Table.from_batches(batches, SCHEMA)


def is_image(name: str) -> bool:
    """By its name. Files that begin with a dot are what systems leave behind, such as `._photo.jpg`."""
    path = PurePosixPath(name)
    return path.suffix[1:].lower() in image_extensions() and not path.name.startswith(".")


def named(name: str) -> tuple[str, str]:
    """Key and extension of a file: webdataset ends a key at its first dot."""
    path = PurePosixPath(name)
    return str(path.with_suffix("")).replace(".", "_"), path.suffix[1:].lower()


def packed(columns: Mapping[str, Any]) -> str | None:
    """What a source says of an image beside its label, as JSON; None where it says nothing."""
    said = {k: v for k, v in columns.items() if v not in (None, "")}
    return json.dumps(said, ensure_ascii=False) if said else None


def numbered(names: Iterable[str]) -> dict[str, int]:
    """The label of every class: its place among the sorted names."""
    return {name: i for i, name in enumerate(sorted(set(names)))}
