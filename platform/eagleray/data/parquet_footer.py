"""Writes a Parquet footer for some pages of one column of another file, so that their bytes are used unchanged.

Readers of Parquet read whole column chunks, which may be a whole file. With such a footer they read any run of pages.
The structs are those of parquet-format (`FileMetaData` and below), in Thrift's compact protocol."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from eagleray.data.parquet_pages import BINARY, I32, I64, LIST, STRUCT

MAGIC = b"PAR1"
BYTES, OPTIONAL, REQUIRED = 6, 1, 0  # values of parquet-format: the type BYTE_ARRAY and two repetition types
CODECS = {name: n for n, name in enumerate(("UNCOMPRESSED", "SNAPPY", "GZIP", "LZO", "BROTLI", "LZ4", "ZSTD"))}
ENCODINGS = (0, 3, 8)  # encodings that pages may have; the header of each page says which
Value = tuple[int, bytes]  # kind of a Thrift value, and its encoding


class Chunk(NamedTuple):
    """Neighbouring pages of one column chunk, with the chunk's dictionary page if any of them needs it."""

    begin: int  # first byte in the file
    end: int
    rows: int  # number of values, null or not
    codec: int  # compression, a value in CODECS


def footer(chunks: Sequence[Chunk], begin: int, depth: int) -> bytes:
    """Return the footer of a new Parquet file, which consists of MAGIC, the bytes of another file from its byte `begin`
    on, and this footer. Each of `chunks` becomes a row group. The column is called `x`. `depth` is the number of nested
    optional fields, all called `x`, around a value, with the column itself; 0: the column is required."""
    names = ["x"] * max(depth, 1)
    leaf = _struct({1: _i32(BYTES), 3: _i32(OPTIONAL if depth else REQUIRED), 4: _text("x")})
    above = [_struct({3: _i32(OPTIONAL), 4: _text("x"), 5: _i32(1)})] * (len(names) - 1)
    schema = [_struct({4: _text("root"), 5: _i32(1)}), *above, leaf]
    rows = sum(chunk.rows for chunk in chunks)
    groups = [_group(chunk, names, chunk.begin - begin + len(MAGIC)) for chunk in chunks]
    data = _struct({1: _i32(1), 2: _list(schema), 3: _i64(rows), 4: _list(groups)})[1]
    return data + len(data).to_bytes(4, "little") + MAGIC


def _group(chunk: Chunk, names: Iterable[str], at: int) -> Value:
    size = chunk.end - chunk.begin
    column = {
        1: _i32(BYTES),
        2: _list([_i32(n) for n in ENCODINGS]),
        3: _list([_text(name) for name in names]),
        4: _i32(chunk.codec),
        5: _i64(chunk.rows),
        6: _i64(size),
        7: _i64(size),
        9: _i64(at),
    }
    return _struct({1: _list([_struct({2: _i64(at), 3: _struct(column)})]), 2: _i64(size), 3: _i64(chunk.rows)})


def _varint(n: int) -> bytes:
    out = bytearray()
    while n > 127:
        out.append(n & 127 | 128)
        n >>= 7
    return bytes([*out, n])


def _i32(n: int) -> Value:
    return I32, _varint(2 * n)


def _i64(n: int) -> Value:
    return I64, _varint(2 * n)


def _text(text: str) -> Value:
    return BINARY, _varint(len(text)) + text.encode()


def _list(values: Sequence[Value]) -> Value:
    head = bytes([len(values) << 4 | values[0][0]]) if len(values) < 15 else b""
    head = head or bytes([15 << 4 | values[0][0]]) + _varint(len(values))
    return LIST, head + b"".join(value for _, value in values)


def _struct(fields: Mapping[int, Value]) -> Value:
    """Encode a struct from its fields, which are in ascending order of their numbers."""
    out, before = b"", 0
    for number, (kind, value) in fields.items():
        out += bytes([number - before << 4 | kind]) + value
        before = number
    return STRUCT, out + b"\0"
