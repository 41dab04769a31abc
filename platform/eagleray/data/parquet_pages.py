"""Computes the size of a Parquet file's pages in memory from the page headers, which readers follow.

In the file, a page may be a thousand times smaller, and the footer may state a wrong size. A page header is a Thrift
struct in the compact protocol (parquet-format, `PageHeader`; Thrift, "Compact protocol encoding")."""

from collections.abc import Collection, Iterator
from typing import BinaryIO, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

HEADER = 2**16  # most bytes of a page header, which may contain statistics
KIND, UNPACKED, PACKED = 1, 2, 3  # fields of a page header: the page's kind, its bytes in memory, its bytes in the file
DATA, DATA_2 = 5, 8  # fields of a page header with the headers of data pages, versions 1 and 2
VALUES, ENCODING, ENCODING_2 = 1, 2, 4  # fields of the headers of data pages
DICTIONARY = 2  # kind of a page with a dictionary
OF_DICTIONARY = (2, 8)  # encodings of values as positions in the dictionary
TRUTHS = (1, 2)  # kinds of true and false, which take a byte in a list and none in a struct
BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, STRUCT = 3, 4, 5, 6, 7, 8, 9, 10, 12
DEPTH = 8  # deepest nesting of structs and lists in a page header; a deeper one raises ValueError, as it is damaged


def largest_page(file: BinaryIO | pa.NativeFile, group: pq.RowGroupMetaData) -> int:
    """Return the bytes in memory of the largest page of a row group. Raises ValueError for damaged headers."""
    return max((page.unpacked for page in pages(file, group)), default=0)


class Page(NamedTuple):
    """A page of a Parquet file."""

    unpacked: int  # bytes in memory
    packed: int  # bytes in the file, without the header
    begin: int = 0  # first byte of the header in the file
    end: int = 0  # byte after the last one in the file
    kind: int = 0  # the type of the page in Parquet's Thrift definition, such as DICTIONARY
    values: int = 0  # number of values, null or not
    needs_dictionary: bool = False


def pages(
    file: BinaryIO | pa.NativeFile, group: pq.RowGroupMetaData, columns: Collection[str] | None = None
) -> Iterator[Page]:
    """Yield the pages of a row group; with `columns`, only those of these columns and of the columns nested in them.
    Raises ValueError for damaged headers."""
    for number in range(group.num_columns):
        column = group.column(number)
        if columns is not None:
            name = f"{column.path_in_schema}."
            if not any(name.startswith(f"{wanted}.") for wanted in columns):
                continue
        yield from pages_between(file, *ends(column), group.num_rows)


def ends(column: pq.ColumnChunkMetaData) -> tuple[int, int]:
    """Return the first byte of a column chunk's pages in the file, and their end."""
    at = min(o for o in (column.dictionary_page_offset, column.data_page_offset) if o)
    return at, at + column.total_compressed_size


def pages_between(file: BinaryIO | pa.NativeFile, at: int, end: int, rows: int) -> Iterator[Page]:
    """Yield the pages, of `rows` rows, from byte `at` to `end` of a file. Raises ValueError for damaged headers."""
    count = 0
    while at < end:
        file.seek(at)
        header = _Reader(file.read(HEADER))
        fields = header.struct()
        unpacked, packed = fields.get(UNPACKED, -1), fields.get(PACKED, -1)
        count += 1
        if not 0 <= min(unpacked, packed) <= max(unpacked, packed) < 2**31 or count > rows + 2:
            raise ValueError(f"page {count} of {rows} rows, of {unpacked} bytes in {packed}")
        more = header.inner.get(DATA) or header.inner.get(DATA_2, {})
        encoding = more.get(ENCODING if DATA in header.inner else ENCODING_2)
        after = at + header.at + packed
        yield Page(unpacked, packed, at, after, fields.get(KIND, -1), more.get(VALUES, 0), encoding in OF_DICTIONARY)
        at = after


class _Reader:
    """Reads the integers of a struct and of the structs in it, and skips everything else."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0
        self.inner: dict[int, dict[int, int]] = {}  # integers of the structs inside the outermost one

    def struct(self, depth: int = 0) -> dict[int, int]:
        """Return the integers of a struct by the ids of their fields."""
        values, field = dict[int, int](), 0
        while kind := self.byte():
            field = field + (kind >> 4) if kind >> 4 else self.integer()
            if kind & 15 in (I16, I32, I64):
                values[field] = self.integer()
            elif kind & 15 == STRUCT and depth == 0:
                self.inner[field] = self.struct(1)
            else:
                self.skip(kind & 15, depth)
        return values

    def skip(self, kind: int, depth: int) -> None:
        """Skip a value of a Thrift `kind`, inside `depth` other values."""
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
