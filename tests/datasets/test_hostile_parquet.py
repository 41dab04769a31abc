"""Parquet files of strangers end in images or in a line that names the file, in bounded memory."""

import datetime
import re
import resource
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.fuzzing import counts, examples, generators, one_line
from helpers.layouts import run_prepare, write_parquet
from helpers.mutations import change_bytes
from helpers.pictures import jpeg
from helpers.sources import find_source, source_error

from eagleray.data import parquet_file
from eagleray.datasets.sources import parquet
from eagleray.datasets.sources.item import table
from eagleray.datasets.sources.source import fetch

ROWS = 2000


def repeated(path: Path, image: bytes, caption: str) -> None:
    """A file in which all rows hold one image and one caption, each of which it stores once."""
    indices = pa.array([0] * ROWS, pa.int32())
    columns = {
        "image": pa.DictionaryArray.from_arrays(indices, pa.array([image], pa.binary())),
        "caption": pa.DictionaryArray.from_arrays(indices, pa.array([caption])),
    }
    plain = {"store_schema": False, "dictionary_pagesize_limit": 2**30}
    pq.write_table(pa.table(columns), path, compression="zstd", **plain)
    assert path.stat().st_size < 2**19


def refused(path: Path) -> str:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    line = source_error("parquet", path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**19  # KiB
    assert line.startswith(f"{path}: ")
    return line


def test_an_image_that_stands_for_all_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "MOST_AT_ONCE", 2**26)
    repeated(tmp_path / "x.parquet", jpeg(1) + bytes(2**21), "a bird")
    assert "row group 0 has more than 67108864 bytes of images" in refused(tmp_path / "x.parquet")


def test_a_caption_that_stands_for_all_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "MOST_TEXT", 2**25)
    repeated(tmp_path / "x.parquet", jpeg(1), "bird " * 2**17)
    assert "the columns beside image have more than 33554432 bytes" in refused(tmp_path / "x.parquet")


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("kind", ["a cell", "a cell in a struct", "a caption"])
def test_a_page_that_unpacks_to_a_gigabyte_is_a_reason(kind: str, version: str, tmp_path: Path) -> None:
    """36 kB took 5 GiB, and were said to have no bytes. The other row group is read."""
    image, zeros = [jpeg(1), jpeg(2)], bytes(2**27)
    columns: list[dict[str, Any]] = [{"image": image, "caption": ["a", "b"], "label": [1.0, 2.0]} for _ in range(2)]
    if kind == "a caption":
        columns[1]["caption"] = ["a", zeros.decode()]
    else:
        columns[1]["image"] = [jpeg(1), zeros]
    path = tmp_path / "x.parquet"
    options = {"compression": "zstd", "data_page_version": version, "data_page_size": 2**30}
    tables = [pa.table(c) for c in columns]
    if kind == "a cell in a struct":
        cells = [pa.array([{"bytes": data, "path": f"{i}.jpg"} for i, data in enumerate(c["image"])]) for c in columns]
        tables = [table.set_column(0, "image", cell) for table, cell in zip(tables, cells, strict=True)]
    with pq.ParquetWriter(path, tables[0].schema, use_dictionary=False, **options) as writer:
        for table_ in tables:
            writer.write_table(table_)
    assert path.stat().st_size < 2**20
    del zeros, tables, columns
    before, found = pa.total_allocated_bytes(), find_source("parquet", path)
    listed = list(found.listing().items)
    assert len({i.key for i in listed}) == len(listed)
    dropped = [i.reason for i in listed if i.reason]
    assert re.fullmatch(r"a page of its row group has \d+ bytes and takes 1342\d+ in memory", dropped[0] or "")
    assert len(dropped) == 2
    assert [(i.label, bytes(d)) for i, d in fetch(table(i for i in listed if not i.reason), found.read)] == [
        (1, jpeg(1)),
        (2, jpeg(2)),
    ]
    assert pa.total_allocated_bytes() - before < 2**20


def test_a_footer_that_lies_about_a_page_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"image": [jpeg(1), bytes(2**20)]}), path, compression="zstd", use_dictionary=False)
    data = path.read_bytes()
    column = pq.ParquetFile(path).metadata.row_group(0).column(0)
    told = varint(2 * column.total_uncompressed_size)
    assert data.count(told)
    path.write_bytes(data.replace(told, varint(2 * 2**10)[:1] + b"\x80" * (len(told) - 2) + b"\x00"))
    monkeypatch.setattr(parquet_file, "FREE", 2**19)
    [first, _] = find_source("parquet", path).listing().items
    assert "bytes and takes 10" in (first.reason or "")


def varint(number: int) -> bytes:
    """A number as Thrift's compact protocol writes it."""
    out = []
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def test_a_value_that_is_stored_once_is_not_repeated_in_memory(tmp_path: Path) -> None:
    """Each of 2,000 rows has the same image of 8 MiB of zeros, which the file stores in some hundred bytes."""
    repeated(tmp_path / "x.parquet", jpeg(1) + bytes(2**23), "a bird")
    assert re.search(r"row group 0 has more than \d+ bytes of images", refused(tmp_path / "x.parquet"))


def test_more_rows_than_there_are_bytes(tmp_path: Path) -> None:
    pq.write_table(pa.table({"image": pa.nulls(10**6, pa.binary())}), tmp_path / "x.parquet")
    assert "says that it has 1000000 rows, in" in refused(tmp_path / "x.parquet")


def test_an_image_beyond_all_limits_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "LARGEST", 1000)
    pq.write_table(pa.table({"image": [jpeg(1), bytes(1001)]}), tmp_path / "x.parquet")
    found = find_source("parquet", tmp_path / "x.parquet")
    (_, first), (item, last) = fetch(table(found.listing().items), found.read)
    assert (bytes(first), bytes(last), item.reason) == (jpeg(1), b"", "the image has 1001 bytes, more than 1000")
    card = run_prepare("parquet", tmp_path / "x.parquet", tmp_path / "out")
    assert list(card["dropped"]) == ["the image has 1001 bytes, more than 1000"]


def test_a_row_group_with_a_name_that_is_not_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    write_parquet(path, 0, 2, caption=pa.array(["a bird", "a tree"]))
    whole = path.read_bytes()
    first, last = whole.index(b"\x07caption"), whole.rindex(b"\x07caption")  # of the schema, and of the row group
    assert first < last
    path.write_bytes(whole[:last] + b"\x07capt\xccon" + whole[last + 8 :])
    assert "row group 0 names a column that cannot be read" in refused(path)


@pytest.mark.parametrize("count", counts(100))
def test_changed_files_end_in_images_or_a_line(count: int | None, tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    days = [datetime.date(2024, 1, 1 + i) for i in range(7)]
    write_parquet(path, 0, 7, caption=pa.array([f"bird {i}" for i in range(7)]), day=pa.array(days))
    whole = path.read_bytes()

    def check(rng: Random) -> None:
        start = rng.choice([0, rng.randrange(len(whole)), len(whole) - rng.randint(1, 1500)])
        path.write_bytes(whole[:start] + change_bytes(rng, whole[start:]))
        with one_line(str(path)):
            found = find_source("parquet", path)
            assert len(list(fetch(table(found.listing().items), found.read))) < 2**16

    examples(generators(count), check, count, many=400)
