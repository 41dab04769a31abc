"""Write an index.parquet that is not true, as a stranger's bucket may have it."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

from eagleray.data.index_file import NAME


class Content(NamedTuple):
    """What an index says: the entries of its shards, and the columns of their rows."""

    entries: list[dict[str, Any]]
    rows: list[dict[str, list[Any]]]


def read(folder: Path) -> Content:
    file = pq.ParquetFile(folder / NAME)
    rows = [file.read_row_group(i).to_pydict() for i in range(file.num_row_groups)]
    return Content(json.loads(file.metadata.metadata[b"shards"]), rows)


def write(folder: Path, content: Content, schema: pa.Schema) -> None:
    """Write an index, whatever it says."""
    with pq.ParquetWriter(folder / NAME, schema) as writer:
        for rows in content.rows:
            columns = [rows.get(field.name, []) for field in schema]
            count = max(map(len, columns))
            table = pa.table(
                [pa.array((c + [None] * count)[:count], f.type) for c, f in zip(columns, schema, strict=True)], schema
            )
            writer.write_table(table)
        writer.add_key_value_metadata({"shards": json.dumps(content.entries)})


def entry(name: str, value: Any) -> Callable[[Content], None]:
    return lambda content: content.entries[0].__setitem__(name, value)


def cell(column: str, row: int, value: Any) -> Callable[[Content], None]:
    return lambda content: content.rows[0][column].__setitem__(row, value)


def add_rows(content: Content) -> None:
    for column in content.rows[0].values():
        column.append(column[-1])


def swap(content: Content) -> None:
    for column in content.rows[0].values():
        column.reverse()


# A change and a pattern for the reason; the first shard has three samples in one block.
CASES: dict[str, tuple[Callable[[Content], None], str]] = {
    "a shard of 2^60 bytes": (entry("size", 2**60), "changed since it was indexed"),
    "a shard of 2^63 bytes": (entry("size", 2**63), "3 and 0 samples in 9223372036854775808 bytes"),
    "a shard of -10 bytes": (entry("size", -10), "3 and 0 samples in -10 bytes"),
    "a size that is a text": (entry("size", "10"), "of another type"),
    "a size that is a fraction": (entry("size", 1e99), "of another type"),
    "more usable samples than rows": (entry("usable", 4), "blocks of 3 samples, of 4"),
    "more bad samples than rows": (entry("bad", 2), "3 rows of 5 samples"),
    "more samples than a shard has room for": (entry("bad", 10**9), "samples in"),
    "no blocks": (entry("blocks", []), "blocks of 0 samples, of 3"),
    "an empty block": (entry("blocks", [3, 0]), "a block without samples"),
    "a block of a billion samples": (entry("blocks", [10**9]), "blocks of 1000000000 samples, of 3"),
    "blocks that are no list": (entry("blocks", {"a": 1}), "of another type"),
    "a tag that is a number": (entry("tag", 7), "of another type"),
    "a name that is a number": (entry("name", 7), "of another type"),
    "a name twice": (entry("name", "x-001.tar"), "two shards of one name"),
    "an entry more": (lambda c: c.entries.append(c.entries[0]), "3 shards in 2 row groups"),
    "an entry that is a list": (lambda c: c.entries.__setitem__(0, ["x"]), "must be a mapping"),
    "a key of the entry more": (entry("more", 1), "more"),
    "a row more": (add_rows, "4 rows of 3 samples"),
    "rows in another order": (swap, "images that overlap"),
    "an image before the shard": (cell("offset", 0, -5), "images that overlap, or lie outside"),
    "an image 2^63 bytes before the shard": (cell("offset", 1, -(2**63)), "images that overlap, or lie outside"),
    "an image behind the shard": (cell("offset", 2, 2**40), "images that overlap, or lie outside"),
    "an image of 2^60 bytes": (cell("size", 2, 2**60), "images of .* to 1152921504606846976 bytes"),
    "an image of no bytes": (cell("size", 0, 0), "images of 0 to"),
    "an image of -1 bytes": (cell("size", 1, -1), "images of -1 to"),
    "two images in one place": (lambda c: c.rows[0]["offset"].__setitem__(1, c.rows[0]["offset"][0]), "overlap"),
    "no offset": (cell("offset", 1, None), "a sample without offset"),
    "no checksum": (cell("crc", 1, None), "a sample without crc"),
    "no label": (cell("label", 1, None), "a sample without label"),
    "a label of -7": (cell("label", 1, -7), "a label below -1"),
    "no reason": (lambda c: c.rows[1]["reason"].__setitem__(3, ""), "a bad sample without reason"),
    "no key": (cell("key", 1, None), "a sample without key"),
}

VALUES = st.sampled_from(
    [
        0,
        1,
        -1,
        2,
        3,
        4,
        10**9,
        2**60,
        2**63,
        -(2**70),
        1.5,
        None,
        True,
        "",
        "x",
        "..",
        [],
        [1],
        [3],
        [1, 2],
        [-3, 6],
        {},
    ]
)
NUMBERS = st.sampled_from([0, 1, -1, 2, 100, 5000, 2**31, 2**60, -(2**63), 2**63 - 1, None])
TEXTS = st.sampled_from(["", "x", "..", "../../etc/passwd", None, "\x00", "\uefe9", "a" * 10_000])


@st.composite
def changes(draw: st.DrawFn, content: Content) -> Content:
    """Draw one to three changes of an index."""
    content = copy.deepcopy(content)
    for _ in range(draw(st.integers(1, 3))):
        which = draw(st.integers(0, len(content.rows) - 1))
        rows = content.rows[which]
        match draw(st.integers(0, 9)):
            case 0 | 1 | 2 | 3 if which < len(content.entries):
                name = draw(st.sampled_from(["name", "size", "tag", "usable", "bad", "labelled", "blocks", "other"]))
                content.entries[which][name] = draw(VALUES)
            case 4 | 5 | 6:
                column = draw(st.sampled_from(["offset", "size", "label"]))
                row = draw(st.integers(0, len(rows[column]) - 1))
                rows[column][row] = draw(NUMBERS)
            case 7:
                column = draw(st.sampled_from(["key", "reason"]))
                rows[column][draw(st.integers(0, len(rows[column]) - 1))] = draw(TEXTS)
            case 8:
                add_rows(Content([], [rows]))
            case 9 if len(content.entries) > 1:
                content.entries.pop(draw(st.integers(0, len(content.entries) - 1)))
    return content


@st.composite
def spoiled(draw: st.DrawFn, data: bytes) -> bytes:
    """Draw a file with some bytes that are others, or cut off, preferably at its end, where Parquet keeps its parts."""
    out = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        near = draw(st.booleans())
        start = max(len(out) - draw(st.integers(1, 600 if near else len(data))), 0)
        out[start : start + 4] = draw(st.binary(min_size=1, max_size=4))
    return bytes(out[: draw(st.sampled_from([len(out)] * 9 + [len(out) // 2]))])
