"""Define an item: where the bytes of one image of a source are, with its key, label and metadata."""

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import pyarrow as pa

from eagleray.base.errors import UserError
from eagleray.data.file_names import from_text, readable, to_text
from eagleray.data.pixels import HEIC_EXTENSIONS, image_extensions
from eagleray.data.tar_headers import LONGEST_NAME

BATCH = 65_536  # items per chunk of a table
MOST = 10**18 - 1  # largest label, as in the index
LONGEST_KEY = LONGEST_NAME - 40  # bytes; with its extension it is a name of a tar


class Item(NamedTuple):
    """One image of a source."""

    key: str
    url: str  # the URL of the file that holds it
    offset: int  # bytes; in a Parquet file the row in its row group
    size: int  # bytes; in a Parquet file an estimate
    extension: str = ""  # lower case; empty when only the bytes tell the format
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

    items: Iterable[Item]  # the order depends on the source alone
    classes: Sequence[str] = ()  # names in the order of the labels
    note: str = ""  # a line about what the source holds and the items lack
    found: Callable[[], str] = str  # the same, where it is known only after the items were read


def table(items: Iterable[Item]) -> pa.Table:
    """Return items as an Arrow table with the columns of SCHEMA.

    A table is used because 14 million Python objects do not fit into the memory of most machines. Its keys and URLs
    are those of `file_names.to_text`, as files may have names that are not UTF-8.
    """
    batches = []
    stream = iter(items)
    while batch := list(itertools.islice(stream, BATCH)):
        columns = [pa.array(c, f.type) for c, f in zip(zip(*map(_stored, batch), strict=True), SCHEMA, strict=True)]
        batches.append(pa.record_batch(columns, schema=SCHEMA))
    return pa.Table.from_batches(batches, SCHEMA)


def _stored(item: Item) -> Item:
    """Return an item as a table and a tar can hold it. Raises UserError for a label that no index can."""
    if item.label > MOST:
        raise UserError(f"{item.url}: the label of {readable(item.key)} is {item.label:.3g}, more than {MOST}")
    if (length := len(item.key.encode(errors="surrogateescape"))) > LONGEST_KEY:
        item = item._replace(key=item.key[:60], reason=f"its key has {length} bytes, more than {LONGEST_KEY}")
    return item._replace(
        key=to_text(item.key.replace("\0", "_")),  # a name in a tar ends at a 0
        url=to_text(item.url),
        reason=item.reason and readable(item.reason),
    )


def items_of(items: pa.Table) -> list[Item]:
    """Return the items of a table, with keys and URLs as Python has file names."""
    rows = map(Item._make, zip(*(column.to_pylist() for column in items.columns), strict=True))
    return [row._replace(key=from_text(row.key), url=from_text(row.url)) for row in rows]


def is_image(name: str) -> bool:
    """Return whether a file is an image, judged by its name.

    Names that begin with a dot, such as `._photo.jpg`, belong to leftovers of an operating system and do not count.
    HEIC counts also where nothing decodes it, so that it is listed as left out.
    """
    path = PurePosixPath(name)
    return path.suffix[1:].lower() in image_extensions() | HEIC_EXTENSIONS and not path.name.startswith(".")


def key_and_extension(name: str) -> tuple[str, str]:
    """Split a file name into key and extension.

    Dots in the key become underscores, because webdataset takes the first dot of a name for the end of its key.
    """
    path = PurePosixPath(name)
    key = str(path.with_suffix("")) if path.name else name  # "/" and "" have no name
    return key.replace(".", "_"), path.suffix[1:].lower()


def metadata_json(columns: Mapping[str, Any]) -> str | None:
    """Encode the metadata of an image, everything but its label, as JSON; return None if there is none."""
    values = {k: v for k, v in columns.items() if v not in (None, "")}
    return to_json(values) if values else None


def to_json(value: Any) -> str:
    """Encode a value as JSON that UTF-8 can hold: lone surrogates stay escaped, as captions from the web have them."""
    return json.dumps(value, ensure_ascii=False).encode(errors="backslashreplace").decode()


def class_labels(names: Iterable[str]) -> dict[str, int]:
    """Number the classes in the sorted order of their names."""
    return {name: i for i, name in enumerate(sorted(set(names)))}
