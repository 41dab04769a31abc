"""Parquet files with a column of images: the bytes alone, or with a path beside them as Hugging Face writes them."""

import io
import math
from collections.abc import Iterator
from functools import partial
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from eagleray.base.errors import UserError
from eagleray.datasets.sources import files
from eagleray.datasets.sources.item import Found, Item, Listing, named, packed
from eagleray.datasets.sources.job import Job
from eagleray.storage.blob import Blob
from eagleray.storage.ordered_map import ahead
from eagleray.storage.range_file import READ, Ranges, Span

LABEL = "label"


def parquet(job: Job) -> Found:
    """One file, or all those of a folder; a column `label` of integers are the classes."""
    single = job.origin.lower().endswith(".parquet")
    blobs = [files.one(job.origin)] if single else [b for b in files.directly(job.origin + "/") if _is_parquet(b)]
    if not blobs:
        raise files.nothing(job.origin, "files that end in .parquet")
    column = _column(blobs[0], job.column)
    return Found(blobs, partial(_listing, blobs, column), column)


def read(url: str, group: int, column: str) -> list[bytes | None]:
    """The images of a row group."""
    cells = opened(files.one(url)).read_row_group(group, columns=[column])[column]
    if pa.types.is_struct(cells.type):
        cells = pa.chunked_array([c.field("bytes") for c in cells.chunks], cells.type.field("bytes").type)
    return cells.to_pylist()  # type: ignore[no-any-return]


def opened(blob: Blob) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(io.BufferedReader(Ranges(Span("", blob.url, 0, blob.size)), READ))
    except pa.ArrowException as e:
        raise UserError(f"{blob.url}: is no Parquet file: {' '.join(str(e).split())}") from None


def _is_parquet(blob: Blob) -> bool:
    name = PurePosixPath(blob.url).name
    return name.lower().endswith(".parquet") and not name.startswith((".", "_"))


def _column(blob: Blob, asked: str) -> str:
    """The column of images: the one that was asked for, or the only one that can be it."""
    schema = opened(blob).schema_arrow
    found = [f.name for f in schema if _holds_images(f.type)]
    if asked and asked not in found:
        raise UserError(f"--column {asked}: {blob.url} has bytes in {', '.join(found) or 'no column'}")
    if not asked and len(found) != 1:
        there = f"{', '.join(found)}; name one with --column" if found else f"none among {', '.join(schema.names)}"
        raise UserError(f"{blob.url}: expected one column of bytes, found {there}")
    return asked or found[0]


def _holds_images(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return any(f.name == "bytes" and _holds_images(f.type) for f in kind)
    return any(test(kind) for test in (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view))


def _listing(blobs: list[Blob], column: str) -> Listing:
    return Listing(item for items in ahead(lambda b: list(_items(b, column)), blobs) for item in items)


def _items(blob: Blob, column: str) -> Iterator[Item]:
    """A row's size would be known only from its bytes, so every row of a group gets the mean."""
    file = opened(blob)
    if column not in file.schema_arrow.names:
        raise UserError(f"{blob.url}: has no column {column!r}, which other files of the source have")
    kind = file.schema_arrow.field(column).type
    path = f"{column}.path" if pa.types.is_struct(kind) and "path" in [f.name for f in kind] else None
    others = [f.name for f in file.schema_arrow if f.name != column and not pa.types.is_nested(f.type)]
    others = [n for n in others if not _holds_images(file.schema_arrow.field(n).type)]
    stem, row = PurePosixPath(blob.url).stem, 0
    for group in range(file.num_row_groups):
        about = file.metadata.row_group(group)
        size = math.ceil(_bytes(about, column) / max(about.num_rows, 1))
        said = file.read_row_group(group, columns=others + ([path] if path else []))
        rows = said.to_pylist() if said.num_columns else [{}] * about.num_rows
        for place, cells in enumerate(rows):
            name = (cells.pop(column, None) or {}).get("path") if path else None
            key, extension = named(PurePosixPath(name).name) if name else (f"{stem}-{row:09d}".replace(".", "_"), "")
            label = cells.pop(LABEL, None)
            known = isinstance(label, int) and label >= 0
            yield Item(key, blob.url, place, size, extension, label if known else -1, group, packed(_plain(cells)))
            row += 1


def _bytes(group: Any, column: str) -> int:
    """Uncompressed, of a column and what is nested in it."""
    columns = [group.column(i) for i in range(group.num_columns)]
    return sum(c.total_uncompressed_size for c in columns if c.path_in_schema.split(".")[0] == column)


def _plain(cells: dict[str, Any]) -> dict[str, Any]:
    """Dates and decimals as text."""
    return {k: v if isinstance(v, str | int | float | bool | None) else str(v) for k, v in cells.items()}
