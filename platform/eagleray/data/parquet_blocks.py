"""Divides the images of a Parquet file into blocks, runs of neighbouring pages, and reads a block with one request.

A block is a row group, several small row groups, or some pages of a large row group. The images of a file have
positions in bytes as if they followed each other without gaps."""

import io
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from eagleray.base.errors import UserError
from eagleray.data.index_schema import BLOCK, LARGEST_BLOCK
from eagleray.data.parquet_footer import CODECS, MAGIC, Chunk, footer
from eagleray.data.parquet_pages import DICTIONARY, ends, pages_between
from eagleray.storage.blob import Blob
from eagleray.storage.range_file import RangeFile, Span

WASTE = 0.05  # largest gap before a part that joins a block, as a fraction of the bytes of the block with this part
MOST_AT_ONCE = 2**28  # most bytes of images unpacked at a time, even if each is as large as the largest dictionary
LOCKS = 64  # number of locks that blocks are distributed over


class Part(NamedTuple):
    """A block, or a piece that may become a part of a block: neighbouring chunks of a file."""

    chunks: list[Chunk]
    size: int  # bytes of its pages in memory


def parts(blob: Blob, metadata: pq.FileMetaData, column: int) -> Iterator[Part]:
    """Yield the blocks of a column of images. Raises UserError for too large pages, ValueError for an invalid
    footer."""
    open_: Part | None = None
    for part in _pieces(blob, metadata, column):
        if part.size > LARGEST_BLOCK:
            raise UserError(
                f"{blob.url}: its images are in pages of {part.size >> 20} MiB, more than {LARGEST_BLOCK >> 20}, which "
                f"cannot be read in parts; `eagleray prepare parquet {blob.url} DST` makes shards of it"
            )
        if open_ and _fits(open_, part):
            open_ = Part(open_.chunks + part.chunks, open_.size + part.size)
            continue
        if open_:
            yield open_
        open_ = part
    if open_:
        yield open_


def _fits(one: Part, other: Part) -> bool:
    """Return whether two successive parts fit into one block, and the gap between them in the file is small."""
    gap, span = other.chunks[0].begin - one.chunks[-1].end, other.chunks[-1].end - one.chunks[0].begin
    return 0 <= gap <= WASTE * span and max(span, one.size + other.size) <= BLOCK


def _pieces(blob: Blob, metadata: pq.FileMetaData, column: int) -> Iterator[Part]:
    """Yield the row groups as parts. Large row groups are divided between pages."""
    source = cast(BinaryIO, io.BufferedReader(RangeFile(Span("", blob.url, 0, blob.size), sparse=True)))
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        chunk = group.column(column)
        if not group.num_rows:
            continue
        begin, end = ends(chunk)
        if not len(MAGIC) <= begin < end <= blob.size or not 0 < chunk.num_values == group.num_rows < 2**31:
            raise ValueError(f"row group {number} has {chunk.num_values} images from {begin} to {end}")
        if chunk.compression not in CODECS:
            raise ValueError(f"row group {number} is compressed with {chunk.compression}")
        codec, size = CODECS[chunk.compression], max(end - begin, chunk.total_uncompressed_size)
        if size <= BLOCK:
            yield Part([Chunk(begin, end, group.num_rows, codec)], size)
        else:
            yield from _divided(source, Chunk(begin, end, group.num_rows, codec))


def _divided(source: BinaryIO, chunk: Chunk) -> Iterator[Part]:
    """Yield a column chunk's pages in parts of about BLOCK bytes. Pages that need the dictionary page stay with it."""
    found = list(pages_between(source, chunk.begin, chunk.end, chunk.rows))
    together = max((n for n, page in enumerate(found) if page.kind == DICTIONARY or page.needs_dictionary), default=-1)
    begin, rows, size = chunk.begin, 0, 0
    for n, page in enumerate(found):
        needed = max(page.unpacked, page.packed)
        if n > together and rows and size + needed > BLOCK:
            yield Part([Chunk(begin, page.begin, rows, chunk.codec)], size)
            begin, rows, size = page.begin, 0, 0
        rows, size = rows + page.values, size + needed
    yield Part([Chunk(begin, chunk.end, rows, chunk.codec)], size)


def unpack(data: memoryview, begin: int, chunks: Sequence[Chunk], depth: int) -> pa.Array:
    """Return the images of `chunks`, null for null cells, from `data`, the bytes of a file from its byte `begin` on
    (`depth`: see `footer`). Raises ValueError or an ArrowException for damaged data, or data too large for a block."""
    size = largest = 0
    source = pa.BufferReader(pa.py_buffer(data))
    for chunk in chunks:
        for page in pages_between(source, chunk.begin - begin, chunk.end - begin, chunk.rows):
            size += page.unpacked
            largest = max(largest, page.unpacked * (page.kind == DICTIONARY))
    if size > LARGEST_BLOCK:
        raise ValueError(f"pages that take {size} bytes in memory")
    whole = pa.BufferReader(b"".join([MAGIC, data, footer(chunks, begin, depth)]))
    rows, total, arrays = MOST_AT_ONCE // max(largest, 1) + 1, 0, list[pa.Array]()
    for batch in pq.ParquetFile(whole).iter_batches(min(rows, 2**31 - 1), use_threads=False):
        array = batch.column(0)
        for _ in range(depth - 1):
            array = pc.struct_field(array, [0])
        total += pc.sum(pc.binary_length(array)).as_py() or 0
        if total > LARGEST_BLOCK:
            raise ValueError(f"more than {LARGEST_BLOCK} bytes of images, which repeat those of a dictionary")
        arrays.append(array)
    if sum(map(len, arrays)) != sum(chunk.rows for chunk in chunks):
        raise ValueError(f"{sum(map(len, arrays))} images of {sum(chunk.rows for chunk in chunks)}")
    return pa.concat_arrays(arrays)


def packed(images: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Return the offsets (n + 1,) at which images begin, and the last one ends, in the joined bytes of n images, and
    these bytes. Null images have no bytes."""
    _, offsets, data = images.buffers()
    places = np.frombuffer(offsets, np.int32)[images.offset : images.offset + len(images) + 1]
    all_bytes = np.frombuffer(data, np.uint8) if data else np.empty(0, np.uint8)
    return places.astype(np.int64) - places[0], all_bytes[places[0] : places[-1]]


class Blocks:
    """The blocks of one file, as its index describes them."""

    def __init__(self, known: Mapping[str, Any]) -> None:
        """`known` is a result of `as_json`. Its `ends` of blocks are positions in the joined bytes of all images."""
        self.depth, self.ends = known["depth"], known["ends"]
        self.chunks = [[Chunk(*row[at : at + 4]) for at in range(0, len(row), 4)] for row in known["chunks"]]

    @staticmethod
    def as_json(depth: int, ends: Sequence[int], chunks: Iterable[Sequence[Chunk]]) -> dict[str, Any]:
        """Return blocks as values that JSON can hold. `depth` is the number of optional fields around an image."""
        return {"depth": depth, "ends": list(ends), "chunks": [[n for c in row for n in c] for row in chunks]}

    def between(self, begin: int, end: int) -> Iterator[tuple[int, slice]]:
        """Yield the index of each block with images between the bytes `begin` and `end`, and the slice between them."""
        for number in range(int(np.searchsorted(self.ends, begin, "right")), len(self.ends)):
            first = self.ends[number - 1] if number else 0
            if first >= end:
                return
            yield number, slice(max(begin - first, 0), min(end, self.ends[number]) - first)


def span(chunks: Sequence[Chunk]) -> tuple[int, int]:
    """Return the bytes of a block's chunks in the file: first, and last (excluded)."""
    return chunks[0].begin, chunks[-1].end


class Unpacked:
    """The unpacked blocks that are in use in this process, so that lanes with a common block unpack it once."""

    def __init__(self) -> None:
        self.locks = [threading.Lock() for _ in range(LOCKS)]
        self.known: weakref.WeakValueDictionary[Any, NDArray[np.uint8]] = weakref.WeakValueDictionary()

    def get(self, key: tuple[Any, ...], load: Callable[[], NDArray[np.uint8]], stale: Any = None) -> NDArray[np.uint8]:
        """Return the images of a block. `load` reads and unpacks them if no lane uses any but the `stale` ones."""
        with self.locks[hash(key) % LOCKS]:
            images = self.known.get(key)
            if images is None or images is stale:
                images = self.known[key] = load()
            return images
