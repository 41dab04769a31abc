"""Parquet files as shards: indexes a file, and reads its images by the index."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from eagleray.base.errors import UserError, one_line
from eagleray.data.checksum import crc32
from eagleray.data.index_file import BLOCKS, PARQUET
from eagleray.data.index_schema import MOST_ROWS, STORED
from eagleray.data.parquet_blocks import Blocks, Part, Unpacked, packed, parts, span, unpack
from eagleray.data.parquet_columns import Columns, choose
from eagleray.data.parquet_file import FREE, batches, excess, open_parquet
from eagleray.data.tar_headers import LONGEST_NAME
from eagleray.data.tar_scan import NO_IMAGE
from eagleray.storage import store
from eagleray.storage.blob import Blob
from eagleray.storage.range_file import PATIENCE

LONGEST_REASON = 300  # most characters of a reason
ROWS = 2**16  # most rows of labels and names that are read at a time
NULL, EMPTY, ELSEWHERE = f"{NO_IMAGE}a null cell", "the image has no bytes", f"{NO_IMAGE}the path of one"


def scan(blob: Blob) -> pa.Table:
    """Return the rows of a file, in its order, with the columns of STORED, and its blocks in the metadata. If a file is
    damaged or not Parquet, the only row has the reason. Raises UserError where it is ambiguous which column is meant,
    and for blocks that are too large."""
    try:
        file = open_parquet(blob)
    except UserError as e:
        return _fault(str(e).removeprefix(f"{blob.url}: "))
    columns = choose(blob.url, file, getattr(blob, "image", ""), getattr(blob, "label", ""))
    if not 0 < file.metadata.num_rows <= MOST_ROWS:
        return _fault(f"{file.metadata.num_rows} rows; expected 1 to {MOST_ROWS}")
    try:
        found = _Found(blob, columns, *_beside(blob, file, columns))
        for part in parts(blob, file.metadata, columns.leaf):
            found.add(part)
    except (pa.ArrowException, ValueError, OverflowError) as e:
        if isinstance(e, UserError):
            raise
        return _fault(f"damaged: {one_line(e)[:LONGEST_REASON]}")
    return found.table()


def _fault(reason: str) -> pa.Table:
    row: dict[str, Any] = {"key": "", "offset": -1, "size": 0, "label": -1, "reason": reason}
    return pa.Table.from_pylist([row], STORED)


class _Found:
    """Collects the rows of a file, block by block."""

    def __init__(self, blob: Blob, columns: Columns, names: pa.Array, labels: NDArray[np.int64]) -> None:
        self.blob, self.columns, self.names, self.labels = blob, columns, names, labels
        self.tables = list[pa.Table]()
        self.row = self.end = 0  # rows, and bytes of images, read so far
        self.usable, self.ends, self.chunks = list[int](), list[int](), list[Sequence[Any]]()

    def add(self, part: Part) -> None:
        """Read a block. If it cannot be unpacked, it becomes one row with the reason."""
        (begin, end), rows = span(part.chunks), sum(chunk.rows for chunk in part.chunks)
        data = store.store(self.blob.url).read(self.blob.url, begin, end - begin, tag=self.blob.tag, patience=PATIENCE)
        first, self.row = self.row, self.row + rows
        try:
            images = unpack(data, begin, part.chunks, self.columns.depth)
        except (pa.ArrowException, ValueError, OSError) as e:
            self.tables.append(
                _fault(f"{rows} images from byte {begin} on cannot be read: {one_line(e)[:LONGEST_REASON]}")
            )
            return
        places, content = packed(images)
        size, null = np.diff(places), images.is_null().to_numpy(zero_copy_only=False)
        view = memoryview(content)  # type: ignore[arg-type]
        crc = [crc32(view[a:b]) for a, b in zip(places[:-1].tolist(), places[1:].tolist(), strict=True)]
        names = self.names.slice(first, rows)
        named = names.is_valid().to_numpy(zero_copy_only=False)
        reason = np.select([null & named, null, size == 0], [ELSEWHERE, NULL, EMPTY], "")
        numbers = pa.array(np.arange(first, self.row)).cast(pa.string())
        good = reason == ""
        columns = {
            "key": pc.coalesce(names, numbers),
            "offset": np.where(good, places[:-1] + self.end, -1),
            "size": size,
            "label": self.labels[first : self.row],
            "crc": pa.array(np.array(crc, np.uint32), mask=~good),
            "reason": pa.array(reason, pa.string(), mask=good),
            "extension": pa.nulls(rows, pa.string()),
        }
        self.tables.append(pa.table([pa.array(columns[f.name], f.type) for f in STORED], STORED))
        if count := int(good.sum()):
            self.end += len(content)
            self.usable.append(count)
            self.ends.append(self.end)
            self.chunks.append(part.chunks)

    def table(self) -> pa.Table:
        """Return all rows, with the blocks in the metadata."""
        known = Blocks.as_json(self.columns.depth, self.ends, self.chunks)
        known |= {"image": self.columns.image, "label": self.columns.label, "classes": list(self.columns.classes)}
        said = {BLOCKS: json.dumps(self.usable), PARQUET: json.dumps(known)}
        return pa.concat_tables(self.tables).replace_schema_metadata(said)


def _beside(blob: Blob, file: pq.ParquetFile, columns: Columns) -> tuple[pa.Array, NDArray[np.int64]]:
    """Return the name, null if there is none, and the class of every row of a file."""
    wanted = [name for name in (columns.path, columns.label) if name]
    names, labels = list[pa.Array](), list[NDArray[np.int64]]()
    for group in range(file.num_row_groups if wanted else 0):
        reason, largest = excess(blob, file, group, wanted)
        if reason:
            raise ValueError(reason)
        for batch in batches(file, blob.url, group, wanted, max(1, min(ROWS, FREE // max(largest, 1)))):
            if columns.path:
                names.append(_names(pc.struct_field(batch.column(columns.image), "path")))
            if columns.label:
                labels.append(_classes(blob.url, columns.label, batch.column(columns.label)))
    rows = file.metadata.num_rows
    return (
        pa.concat_arrays(names) if names else pa.nulls(rows, pa.string()),
        np.concatenate(labels) if labels else np.full(rows, -1, np.int64),
    )


def _names(paths: pa.Array) -> pa.Array:
    """Return paths as text, cut to a limit, null if empty. Raises an ArrowException for paths that are not UTF-8."""
    texts = paths.cast(pa.string())
    texts.validate(full=True)
    texts = pc.utf8_slice_codeunits(texts, 0, LONGEST_NAME // 4)
    return pc.if_else(pc.equal(texts, ""), None, texts)


def _classes(url: str, name: str, values: pa.Array) -> NDArray[np.int64]:
    """Return the classes of a column, -1 where missing. Whole numbers may be floats, as pandas stores integers if one
    is missing. Raises UserError for other floats."""
    if pa.types.is_floating(values.type):
        floats = values.fill_null(np.nan).to_numpy(zero_copy_only=False).astype(np.float64)
        wrong = floats[~np.isnan(floats) & ~(np.floor(floats) == floats)]
        if len(wrong):
            raise UserError(f"{url}: label={name}: holds {wrong[0]:g}; expected whole numbers, or label=none")
        values = pa.array(np.where(np.isnan(floats) | (np.abs(floats) >= 2**53), -1, floats).astype(np.int64))
    numbers = values.cast(pa.int64(), safe=False).fill_null(-1).to_numpy(zero_copy_only=False)
    return np.maximum(numbers, -1)


_unpacked = Unpacked()


def read(blob: Blob, known: Any, begin: int, end: int, patience: float, stale: Any = None) -> memoryview:
    """Return the bytes of a file's images from `begin` to `end`, offsets as in its index. `known` is `Shard.parquet`.

    Pages that can no longer be unpacked are read as zeros: their checksums are wrong, so they count as broken samples
    and do not stop the run. For `stale` see `Unpacked`. Raises UserError and Outage for failures of the store."""
    blocks = Blocks(known)
    out = list[memoryview]()
    for number, some in blocks.between(begin, end):
        chunks = blocks.chunks[number]
        first = blocks.ends[number - 1] if number else 0

        def load(chunks: Sequence[Any] = chunks, size: int = blocks.ends[number] - first) -> NDArray[np.uint8]:
            at, stop = span(chunks)
            data = store.store(blob.url).read(blob.url, at, stop - at, tag=blob.tag, patience=patience)
            try:
                content = packed(unpack(data, at, chunks, blocks.depth))[1]
            except (pa.ArrowException, ValueError, OSError):
                content = np.zeros(0, np.uint8)
            return content if len(content) == size else np.zeros(size, np.uint8)

        images = _unpacked.get((blob.url, blob.tag, number), load, stale)
        out.append(memoryview(images)[some])  # type: ignore[arg-type]
    return out[0] if len(out) == 1 else memoryview(b"".join(out))
