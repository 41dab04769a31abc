"""Says how large the pages of a Parquet file become in memory, by the same headers that a reader follows.

A page may be stored in a thousandth of its size, and the footer need not tell the truth about it. A page header is a
Thrift struct in the compact protocol (parquet-format, `PageHeader`; Thrift, "Compact protocol encoding").
"""

from collections.abc import Collection, Iterator
from typing import BinaryIO, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

HEADER = 2**16  # bytes of a page header, which may contain statistics
UNPACKED, PACKED = 2, 3  # fields of a page header: bytes of the page in memory, and in the file
TRUTHS = (1, 2)  # true and false are kinds of their own, which take a byte in a list and none in a struct
BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, STRUCT = 3, 4, 5, 6, 7, 8, 9, 10, 12
DEPTH = 8  # the deepest nesting of structs


def largest_page(file: BinaryIO | pa.NativeFile, group: pq.RowGroupMetaData) -> int:
    """Return the size in memory of the largest page of a row group, bytes. Raises ValueError for damaged headers."""
    return max((page.unpacked for page in pages(file, group)), default=0)


class Page(NamedTuple):
    """The bytes of a page in memory, and in the file."""

    unpacked: int
    packed: int


def pages(
    file: BinaryIO | pa.NativeFile, group: pq.RowGroupMetaData, columns: Collection[str] | None = None
) -> Iterator[Page]:
    """Yield the pages of a row group, or of those columns with their nested ones. Raises ValueError for damaged
    headers."""
    for number in range(group.num_columns):
        column = group.column(number)
        if columns is not None:
            name = f"{column.path_in_schema}."
            if not any(name.startswith(f"{wanted}.") for wanted in columns):
                continue
        at = min(o for o in (column.dictionary_page_offset, column.data_page_offset) if o)
        end, count = at + column.total_compressed_size, 0
        while at < end:
            file.seek(at)
            header = _Reader(file.read(HEADER))
            sizes = header.struct()
            page = Page(sizes.get(UNPACKED, -1), sizes.get(PACKED, -1))
            count += 1
            if not 0 <= min(page) <= max(page) < 2**31 or count > group.num_rows + 2:
                raise ValueError(f"page {count} of {group.num_rows} rows, of {page.unpacked} bytes in {page.packed}")
            yield page
            at += header.at + page.packed


class _Reader:
    """Reads the integers of a struct, and passes over everything else."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def struct(self, depth: int = 0) -> dict[int, int]:
        """Return the integers of a struct by their fields."""
        values, field = {}, 0
        while kind := self.byte():
            field = field + (kind >> 4) if kind >> 4 else self.integer()
            if kind & 15 in (I16, I32, I64):
                values[field] = self.integer()
            else:
                self.skip(kind & 15, depth)
        return values

    def skip(self, kind: int, depth: int) -> None:
        """Pass over a value."""
        if kind == STRUCT and depth < DEPTH:
            self.struct(depth + 1)
        elif kind == BINARY:
            length = self.varint()
            self.at += length
        elif kind == DOUBLE:
            self.at += 8
        elif kind == BYTE:
            self.at += 1
        elif kind in (I16, I32, I64):
            self.varint()
        elif kind in (LIST, SET) and depth < DEPTH:
            head = self.byte()
            for _ in range(self.varint() if head >> 4 == 15 else head >> 4):
                self.skip(BYTE if head & 15 in TRUTHS else head & 15, depth + 1)
                self.check()
        elif kind not in TRUTHS:
            raise ValueError(f"a page header with a value of kind {kind}")

    def byte(self) -> int:
        self.check()
        self.at += 1
        return self.data[self.at - 1]

    def varint(self) -> int:
        value = shift = 0
        while (byte := self.byte()) & 128 and shift < 63:
            value |= (byte & 127) << shift
            shift += 7
        return value | byte << shift

    def integer(self) -> int:
        value = self.varint()
        return value >> 1 ^ -(value & 1)

    def check(self) -> None:
        if self.at >= len(self.data):
            raise ValueError("a page header that is cut off")
