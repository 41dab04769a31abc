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
MOST = 10**18 - 1  # largest label that the index accepts
LONGEST_KEY = LONGEST_NAME - 40  # most bytes of a key; 40 stay for the extension, as both form one name in a tar


class Item(NamedTuple):
    """One image of a source."""

    key: str
    url: str  # URL of the file that holds the image
    offset: int  # bytes; in Parquet the row's index in its row group, in HDF5 and MATLAB files the image's index
    size: int  # bytes; in a Parquet file an estimate
    extension: str = ""  # lower case; empty if only the bytes tell the format
    label: int = -1
    group: int = -1  # index of the row group or HDF5 chunk that is read as a whole; -1 if the image is read by itself
    meta: str | None = None  # metadata in JSON
    reason: str | None = None  # why the image is dropped; None: it is kept


TEXT = pa.large_string()  # an array of pa.string() holds at most 2 GiB
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

    items: Iterable[Item]  # their order depends on the source alone
    classes: Sequence[str] = ()  # names by label
    note: str = ""  # one line about data of the source that the items lack, such as labels
    found: Callable[[], Iterable[str]] = tuple  # returns more such lines; may be called once all items have been read


def table(items: Iterable[Item]) -> pa.Table:
    """Return items as an Arrow table with the columns of SCHEMA: 14 million Python objects would not fit into memory.

    Keys and URLs are stored by `file_names.to_text`, as files may have names that are not UTF-8."""
    batches = []
    stream = iter(items)
    while batch := list(itertools.islice(stream, BATCH)):
        columns = [pa.array(c, f.type) for c, f in zip(zip(*map(_stored, batch), strict=True), SCHEMA, strict=True)]
        batches.append(pa.record_batch(columns, schema=SCHEMA))
    return pa.Table.from_batches(batches, SCHEMA)


def _stored(item: Item) -> Item:
    """Return an item whose texts are valid UTF-8 and whose key can be a name in a tar. An item whose key is too long
    gets a reason to be dropped. Raises UserError for a label above MOST."""
    if item.label > MOST:
        raise UserError(f"{item.url}: the label of {readable(item.key)} is {item.label:.3g}, more than {MOST}")
    if (length := len(item.key.encode(errors="surrogateescape"))) > LONGEST_KEY:
        item = item._replace(key=item.key[:60], reason=f"its key has {length} bytes, more than {LONGEST_KEY}")
    return item._replace(
        key=to_text(item.key.replace("\0", "_")),  # a name in a tar ends at a null byte
        url=to_text(item.url),
        reason=item.reason and readable(item.reason),
    )


def items_of(items: pa.Table) -> list[Item]:
    """Return the items of a table. Keys and URLs are file names as Python decodes them, with surrogates (PEP 383)."""
    rows = map(Item._make, zip(*(column.to_pylist() for column in items.columns), strict=True))
    return [row._replace(key=from_text(row.key), url=from_text(row.url)) for row in rows]


def is_image(name: str) -> bool:
    """Return whether a file is an image, judged by its name.

    Names that begin with a dot, such as `._photo.jpg`, are leftovers of an operating system and do not count. HEIC
    counts even if nothing decodes it, so that it is listed as left out."""
    path = PurePosixPath(name)
    return path.suffix[1:].lower() in image_extensions() | HEIC_EXTENSIONS and not path.name.startswith(".")


def key_and_extension(name: str) -> tuple[str, str]:
    """Split a file name into key and extension.

    Dots in the key become underscores, because webdataset ends the key at the first dot of a name."""
    path = PurePosixPath(name)
    key = str(path.with_suffix("")) if path.name else name  # "/" and "" have no name
    return key.replace(".", "_"), path.suffix[1:].lower()


def metadata_json(columns: Mapping[str, Any]) -> str | None:
    """Encode `columns`, the metadata of an image without its label, as JSON. Return None if all of them are empty."""
    values = {k: v for k, v in columns.items() if v not in (None, "")}
    return to_json(values) if values else None


def to_json(value: Any) -> str:
    """Encode a value as JSON in valid UTF-8: lone surrogates, as in captions from the web, stay escaped."""
    return json.dumps(value, ensure_ascii=False).encode(errors="backslashreplace").decode()


def class_labels(names: Iterable[str]) -> dict[str, int]:
    """Number the classes in the sorted order of their names."""
    return {name: i for i, name in enumerate(sorted(set(names)))}
