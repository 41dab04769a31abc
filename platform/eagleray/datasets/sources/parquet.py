"""Read Parquet files with a column of images: bytes or, as Hugging Face writes them, bytes with a file path."""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from eagleray.base.errors import UserError, explained
from eagleray.data.parquet_columns import may_hold_images
from eagleray.data.parquet_file import FREE, PER_BYTE, batches, excess, open_parquet
from eagleray.data.tar_scan import LARGEST
from eagleray.datasets.sources import files
from eagleray.datasets.sources.item import Item, Listing, key_and_extension, metadata_json
from eagleray.datasets.sources.source import PrepareOptions, SourceFiles
from eagleray.storage.blob import Blob
from eagleray.storage.ordered_map import ordered_map
from eagleray.storage.shard_names import is_parquet
from eagleray.storage.store import list_shards

LABEL = "label"
MOST_AT_ONCE = 2**32  # most bytes of images in a shard, and so in a row group
FEW = 2**16  # rows that a file of any size may have; a file of more bytes may have one row per byte
MOST_TEXT = 2**31  # most characters of the metadata of one file
ROWS = 256  # most rows that are read at a time from the columns without images


def parquet(options: PrepareOptions) -> SourceFiles:
    """Find one Parquet file, all those in a folder, or those that a pattern or an hf:// URL selects. Whole numbers in a
    column named `label` are classes."""
    if options.origin.startswith("hf://") or any(c in options.origin for c in "*?["):
        blobs = [b for b in list_shards(options.origin) if is_parquet(b.url)]
    elif options.origin.lower().endswith(".parquet"):
        blobs = [files.find_file(options.origin)]
    else:
        blobs = [b for b in files.list_folder(options.origin + "/") if is_parquet(b.url)]
    if not blobs:
        raise files.missing_error(options.origin, "files that end in .parquet")
    column = _image_column(blobs[0], options.column)
    return SourceFiles(blobs, partial(_listing, blobs, column), partial(read_images, column))


def read_images(column: str, rows: Sequence[Item]) -> Iterator[tuple[Item, bytes]]:
    """Yield the items of Parquet rows with the bytes of their images.

    Every row group is read once. Only the images of these items are held in memory. If an image is too large for any
    shard, its item comes without bytes and with a reason to be dropped."""
    groups: dict[tuple[str, int], list[int]] = {}
    for position, item in enumerate(rows):
        groups.setdefault((item.url, item.group), []).append(position)
    images, items = [b""] * len(rows), list(rows)
    total = most = 0
    for (url, group), positions in groups.items():
        wanted = {rows[position].offset: position for position in positions}
        file = open_parquet(blob := files.find_file(url))
        metadata = file.metadata.row_group(group)
        packed = sum(metadata.column(i).total_compressed_size for i in range(metadata.num_columns))
        most += FREE + PER_BYTE * min(packed, blob.size)
        for row, image in enumerate(_images_of_group(file, url, group, column)):
            if row in wanted and len(image or b"") > LARGEST:
                reason = f"the image has {len(image or b'')} bytes, more than {LARGEST}"
                items[wanted[row]] = items[wanted[row]]._replace(reason=reason)
            elif image and row in wanted:
                images[wanted[row]] = image.to_pybytes()
                total += len(image)
            if total > min(most, MOST_AT_ONCE):
                bytes_ = f"{min(most, MOST_AT_ONCE)} bytes of images"
                raise UserError(f"{url}: row group {group} has more than {bytes_}; divide it")
    return zip(items, images, strict=True)


def _images_of_group(file: pq.ParquetFile, url: str, group: int, column: str) -> Iterator[pa.Buffer | None]:
    """Yield the images of a row group, in the order of its rows. One row is read at a time: with dictionary encoding,
    all rows may hold one large value that is stored once, and together they may not fit into memory."""
    for batch in batches(file, url, group, [column], 1):
        cells = batch.column(0)
        cells = cells.field("bytes") if pa.types.is_struct(cells.type) else cells
        yield from (cell.as_buffer() if cell.is_valid else None for cell in cells)


def _image_column(blob: Blob, column: str) -> str:
    """Return the name of the column with the images: `column` if it is not empty, otherwise the only column of bytes.

    Raises UserError when `column` holds no bytes, or when it is empty and there is not exactly one column of bytes."""
    schema = open_parquet(blob).schema_arrow
    names = [f.name for f in schema if may_hold_images(f.type)]
    if column and column not in names:
        raise UserError(
            f"--column {column}: not a column of bytes in {blob.url}; expected one of: {', '.join(names) or 'none'}"
        )
    if not column and len(names) != 1:
        columns = f"{', '.join(names)}; name one with --column" if names else f"none among {', '.join(schema.names)}"
        raise UserError(f"{blob.url}: expected one column of bytes, found {columns}")
    return column or names[0]


def _listing(blobs: list[Blob], column: str) -> Listing:
    strange = next((why for why in ordered_map(partial(_no_classes, column), blobs) if why), "")
    items = ordered_map(lambda b: list(_items(b, column, labelled=not strange)), blobs)
    return Listing((item for of_file in items for item in of_file), note=strange)


def _open_listed(blob: Blob) -> pq.ParquetFile:
    """Open a file to read its rows. Raises UserError if it claims more rows than a file of its size can have."""
    file = open_parquet(blob)
    if file.metadata.num_rows > max(blob.size, FEW):
        raise UserError(f"{blob.url}: says that it has {file.metadata.num_rows} rows, in {blob.size} bytes")
    return file


def _no_classes(column: str, blob: Blob) -> str:
    """Return in one line why a file's column `label` does not hold classes, or "" if it does or is missing. Whole
    floating-point numbers are classes, as pandas stores integers as floats if one is missing."""
    file = _open_listed(blob)
    if column == LABEL or LABEL not in file.schema_arrow.names:
        return ""
    kind = whole = file.schema_arrow.field(LABEL).type
    if pa.types.is_dictionary(kind):
        whole = kind.value_type
    if any(test(whole) for test in (pa.types.is_integer, pa.types.is_boolean, pa.types.is_null)):
        return ""
    found = f"values of the type {kind}"
    if pa.types.is_floating(whole):
        whole_groups = [g for g in range(file.num_row_groups) if not excess(blob, file, g, [LABEL])[0]]
        rows = (row for group in whole_groups for row in _rows(file, blob.url, group, [LABEL]))
        values = (float(row[LABEL]) for row in rows if row[LABEL] is not None)
        wrong = next((value for value in values if not (value.is_integer() or math.isnan(value))), None)
        if wrong is None:
            return ""
        found = f"{wrong:g}"
    place = "left out" if pa.types.is_nested(kind) or may_hold_images(kind) else "kept in the .json of the images"
    return f"{blob.url}: the column {LABEL} holds {found}; expected whole numbers, so it is {place} and no class is set"


def _items(blob: Blob, column: str, *, labelled: bool) -> Iterator[Item]:
    """Yield an item for every row of a file, with the class in the column `label` if the files are `labelled`.

    The size of an image is estimated as the mean of its row group, as the exact size is known only after reading it."""
    file = _open_listed(blob)
    if column not in file.schema_arrow.names:
        raise UserError(f"{blob.url}: has no column {column!r}, which other files of the source have")
    kind = file.schema_arrow.field(column).type
    path = f"{column}.path" if pa.types.is_struct(kind) and "path" in [f.name for f in kind] else None
    others = [f.name for f in file.schema_arrow if f.name != column and not pa.types.is_nested(f.type)]
    others = [n for n in others if not may_hold_images(file.schema_arrow.field(n).type)]
    stem, number, meta_bytes = PurePosixPath(blob.url).stem, 0, 0
    for group in range(file.num_row_groups):
        metadata = file.metadata.row_group(group)
        with explained(f"{blob.url}: row group {group} names a column that cannot be read", UnicodeDecodeError):
            size = math.ceil(max(_column_bytes(metadata, column), 0) / max(metadata.num_rows, 1))
        beside = others + ([path] if path else [])
        (of_images, _), (of_others, page) = (excess(blob, file, group, names) for names in ([column], beside))
        if reason := of_images or of_others:
            for row in range(metadata.num_rows):
                key = f"{stem}-{number:09d}".replace(".", "_")
                yield Item(key, blob.url, row, size, group=group, reason=reason)
                number += 1
            continue
        at_once = max(1, min(ROWS, FREE // max(page, 1)))
        for row, cells in enumerate(_rows(file, blob.url, group, beside, at_once)):
            name = (cells.pop(column, None) or {}).get("path") if path else None
            if name and PurePosixPath(name).name:  # "/" and "." have no name
                key, extension = key_and_extension(PurePosixPath(name).name)
            else:
                key, extension = f"{stem}-{number:09d}".replace(".", "_"), ""
            value = cells.pop(LABEL, None) if labelled else None
            label = -1 if value is None or math.isnan(value) else max(int(value), -1)
            meta = metadata_json({k: _plain(v) for k, v in cells.items()})
            meta_bytes += len(meta or "")
            if meta_bytes > MOST_TEXT:
                raise UserError(f"{blob.url}: the columns beside {column} have more than {MOST_TEXT} bytes")
            yield Item(key, blob.url, row, size, extension, label, group, meta)
            number += 1


def _rows(
    file: pq.ParquetFile, url: str, group: int, columns: list[str], at_once: int = ROWS
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a group. Raises UserError for text that is not UTF-8 or a date that Python cannot hold."""
    if not columns:
        yield from ({} for _ in range(file.metadata.row_group(group).num_rows))
        return
    with explained(f"{url}: has a value that cannot be read", ValueError, OverflowError):
        for batch in batches(file, url, group, columns, at_once):
            yield from batch.to_pylist()


def _column_bytes(group: Any, column: str) -> int:
    """Return the uncompressed bytes of a column and its nested columns, from the metadata of a row group."""
    columns = [group.column(i) for i in range(group.num_columns)]
    return sum(c.total_uncompressed_size for c in columns if c.path_in_schema.split(".")[0] == column)


def _plain(value: Any) -> Any:
    """Convert a cell that JSON cannot hold, such as a date, a decimal or infinity, to text, and NaN to None."""
    if isinstance(value, float) and math.isnan(value):
        return None
    plain = isinstance(value, str | int | None) or (isinstance(value, float) and math.isfinite(value))
    return value if plain else str(value)
