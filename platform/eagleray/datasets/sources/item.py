"""Define an item: where the bytes of one image of a source are, with its key, label and metadata."""

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import pyarrow as pa

from eagleray.data.tar_scan import image_extensions

BATCH = 65_536  # items per chunk of a table


class Item(NamedTuple):
    """One image of a source."""

    key: str
    url: str  # of the file that holds it
    offset: int  # bytes; in a Parquet file the row in its row group
    size: int  # bytes; in a Parquet file an estimate
    extension: str = ""  # in lower case; empty when only the bytes tell the format
    label: int = -1
    group: int = -1  # row group of a Parquet file, which is read as a whole; -1 where every image is read by itself
    meta: str | None = None  # JSON
    reason: str | None = None  # why the image is dropped


TEXT = pa.large_string()  # the offsets of plain strings end at 2 GiB
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
    """The items of a source and the names of its classes."""

    items: Iterable[Item]  # in an order that depends on the source alone
    classes: Sequence[str] = ()  # names in the order of the labels


def table(items: Iterable[Item]) -> pa.Table:
    """Return items as an Arrow table with the columns of SCHEMA.

    A table is used because 14 million Python objects do not fit into the memory of most machines.
    """
    batches = []
    stream = iter(items)
    while batch := list(itertools.islice(stream, BATCH)):
        columns = [pa.array(c, f.type) for c, f in zip(zip(*batch, strict=True), SCHEMA, strict=True)]
        batches.append(pa.record_batch(columns, schema=SCHEMA))
    return pa.Table.from_batches(batches, SCHEMA)


def is_image(name: str) -> bool:
    """Return whether a file is an image, judged by its name.

    Names that begin with a dot, such as `._photo.jpg`, belong to leftovers of an operating system and do not count.
    """
    path = PurePosixPath(name)
    return path.suffix[1:].lower() in image_extensions() and not path.name.startswith(".")


def key_and_extension(name: str) -> tuple[str, str]:
    """Split a file name into key and extension.

    Dots in the key become underscores, because webdataset takes the first dot of a name for the end of its key.
    """
    path = PurePosixPath(name)
    return str(path.with_suffix("")).replace(".", "_"), path.suffix[1:].lower()


def metadata_json(columns: Mapping[str, Any]) -> str | None:
    """Encode the metadata of an image, everything but its label, as JSON; return None if there is none."""
    values = {k: v for k, v in columns.items() if v not in (None, "")}
    return json.dumps(values, ensure_ascii=False) if values else None


def class_labels(names: Iterable[str]) -> dict[str, int]:
    """Number the classes in the sorted order of their names."""
    return {name: i for i, name in enumerate(sorted(set(names)))}
