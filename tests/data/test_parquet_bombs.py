"""An index.parquet that becomes gigabytes in memory is refused by name, before it does."""

import contextlib
import io
import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.fuzzing import counts, examples, generators
from helpers.hostile_indexes import Content, write
from helpers.mutations import change_bytes

from eagleray.base.errors import UserError
from eagleray.data.index_file import LARGEST_PAGE, MOST_AT_ONCE, NAME, SCHEMA, File
from eagleray.data.parquet_pages import largest_page

ROWS = 3000


def columns(rows: int, **more: Any) -> dict[str, list[Any]]:
    """Rows of samples of ten bytes."""
    ones = {"key": [f"s{i}" for i in range(rows)], "size": [10] * rows, "label": [0] * rows, "crc": [1] * rows}
    return ones | {"offset": [20 * i for i in range(rows)], "reason": [None] * rows} | more


def entry(rows: int, **more: Any) -> dict[str, Any]:
    ones = {"name": "x.tar", "size": 512 * rows, "tag": "t", "usable": rows, "bad": 0, "labelled": True}
    return ones | {"blocks": [rows]} | more


def read_all(path: Path) -> list[str]:
    return File(path).read(0)["key"].to_pylist()  # type: ignore[no-any-return]


READ = """
import resource, sys
from pathlib import Path
from eagleray.base.errors import UserError
from eagleray.data.index_file import File
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    File(Path(sys.argv[1])).read(0)
except UserError as e:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, e)
"""


def refused(path: Path) -> str:
    """The line with which an index is refused in a new process, whose peak shows that little memory was taken."""
    done = subprocess.run([sys.executable, "-c", READ, path], capture_output=True, text=True, check=True)
    peak, line = done.stdout.strip().split(" ", 1)
    assert int(peak) * 2**10 < 3 * MOST_AT_ONCE  # what holds one batch doubles as it grows
    assert line.startswith(f"{path}: is damaged (x.tar: ")
    return line


def test_one_name_that_stands_for_all_rows(tmp_path: Path) -> None:
    """3,000 names of a megabyte in a file of 200 kB: the dictionary of the column holds one."""
    path = tmp_path / NAME
    values = columns(ROWS, key=["?"] * ROWS)
    table = pa.table([pa.array(values[f.name], f.type) for f in SCHEMA], SCHEMA)
    names = pa.DictionaryArray.from_arrays(pa.array([0] * ROWS, pa.int32()), pa.array(["n" * 2**20]))
    table = table.set_column(0, "key", names)
    options: Any = {"use_dictionary": ["key"], "dictionary_pagesize_limit": 2**30, "store_schema": False}
    with pq.ParquetWriter(path, table.schema, compression="zstd", **options) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({"shards": json.dumps([entry(ROWS)])})
    assert path.stat().st_size < 2**18
    assert "bytes of names and reasons" in refused(path)


def test_one_name_of_many_megabytes(tmp_path: Path) -> None:
    write(tmp_path, Content([entry(1)], [columns(1, key=["n" * 2 * LARGEST_PAGE])]), SCHEMA)
    assert re.search(r"a page of 335544\d\d bytes", refused(tmp_path / NAME))


def test_names_within_the_bounds_are_read(tmp_path: Path) -> None:
    keys = [f"{'folder/' * 20}{i:05d}" for i in range(ROWS)]
    write(tmp_path, Content([entry(ROWS)], [columns(ROWS, key=keys)]), SCHEMA)
    assert read_all(tmp_path / NAME) == keys


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("dictionary", [True, False])
def test_pages_are_as_large_as_their_headers_say(tmp_path: Path, version: str, dictionary: bool) -> None:
    options: Any = {"use_dictionary": dictionary, "data_page_version": version, "write_page_index": True}
    table = pa.table({"a": [f"{i:0100d}" for i in range(50)], "b": list(range(50)), "c": [[1.5, None]] * 50})
    pq.write_table(table, tmp_path / "x", compression="zstd", **options)
    group = pq.ParquetFile(tmp_path / "x").metadata.row_group(0)
    with (tmp_path / "x").open("rb") as file:
        assert largest_page(file, group) in range(50 * 104, 50 * 104 + 20)


def test_a_page_header_with_endless_booleans_is_refused_at_once(tmp_path: Path) -> None:
    """A list may say that it has 2^60 elements; each boolean in it takes a byte."""
    path = tmp_path / NAME
    write(tmp_path, Content([entry(ROWS)], [columns(ROWS)]), SCHEMA)
    column = pq.ParquetFile(path).metadata.row_group(0).column(0)
    at = min(o for o in (column.dictionary_page_offset, column.data_page_offset) if o)
    data = bytearray(path.read_bytes())
    data[at : at + 11] = b"\x19\xf1" + b"\x80" * 8 + b"\x10"
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"is damaged \(x.tar: a page header that is cut off\)"):
        read_all(path)


@pytest.mark.parametrize("count", counts(300))
def test_changed_page_headers_end_in_sizes_or_a_reason(count: int | None, tmp_path: Path) -> None:
    path = tmp_path / "x"
    pq.write_table(
        pa.table({"a": [f"{i:0100d}" for i in range(50)], "b": list(range(50))}), path, data_page_version="2.0"
    )
    group, whole = pq.ParquetFile(path).metadata.row_group(0), path.read_bytes()
    column = group.column(0)
    start = min(o for o in (column.dictionary_page_offset, column.data_page_offset) if o)

    def changed(rng: random.Random) -> bytes:
        return whole[:start] + change_bytes(rng, whole[start : start + 100]) + whole[start + 100 :]

    def check(data: bytes) -> None:
        with contextlib.suppress(ValueError):
            assert largest_page(io.BytesIO(data), group) < 2**31

    examples(generators(count).map(changed), check, count, many=2000)
