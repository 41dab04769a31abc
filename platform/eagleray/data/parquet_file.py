"""Opens Parquet files, local or in a store, and reads their columns other than images, in bounded memory."""

import io
from collections.abc import Iterator, Sequence
from typing import BinaryIO, cast

import pyarrow as pa
import pyarrow.parquet as pq

from eagleray.base.errors import explained
from eagleray.data.parquet_pages import pages
from eagleray.storage.blob import Blob
from eagleray.storage.range_file import READ, RangeFile, Span

FREE, PER_BYTE = 2**26, 64  # bytes of memory that any page may take; more for each of its bytes in the file


def open_parquet(blob: Blob) -> pq.ParquetFile:
    """Open a Parquet file, local or in a store. Raises UserError when it is not in the Parquet format."""
    with explained(f"{blob.url}: not a Parquet file", pa.ArrowException, OSError, UnicodeDecodeError):
        file = pq.ParquetFile(io.BufferedReader(RangeFile(Span("", blob.url, 0, blob.size)), READ))
        assert file.schema_arrow is not None  # read now, so that its errors are explained
        return file


def excess(blob: Blob, file: pq.ParquetFile, group: int, columns: Sequence[str]) -> tuple[str, int]:
    """Return why a row group would take too much memory, or "", and the bytes of its largest page in memory. Some
    thousand bytes may unpack to gigabytes, which the footer need not say. Raises UserError for damaged page headers."""
    source = io.BufferedReader(RangeFile(Span("", blob.url, 0, blob.size), sparse=True))
    largest = 0
    with explained(f"{blob.url}: row group {group} cannot be read", ValueError):
        for page in pages(cast(BinaryIO, source), file.metadata.row_group(group), columns):
            largest = max(largest, page.unpacked)
            if page.unpacked > FREE + PER_BYTE * page.packed:
                return f"a page of its row group has {page.packed} bytes and takes {page.unpacked} in memory", largest
    return "", largest


def batches(file: pq.ParquetFile, url: str, group: int, columns: list[str], rows: int) -> Iterator[pa.RecordBatch]:
    """Yield a row group, at most `rows` rows at a time: with dictionary encoding, all rows may hold one large value."""
    with explained(f"{url}: row group {group} cannot be read", pa.ArrowException, OSError):
        yield from file.iter_batches(rows, row_groups=[group], columns=columns)
