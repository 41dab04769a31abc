"""Parquet files of strangers end in images or in a line that names the file, in bounded memory."""

import datetime
import resource
from pathlib import Path
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.fuzzing import counts, examples, generators, one_line
from helpers.layouts import write_parquet
from helpers.mutations import change_bytes
from helpers.pictures import jpeg
from helpers.sources import find_source, source_error

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


def test_more_rows_than_there_are_bytes(tmp_path: Path) -> None:
    pq.write_table(pa.table({"image": pa.nulls(10**6, pa.binary())}), tmp_path / "x.parquet")
    assert "says that it has 1000000 rows, in" in refused(tmp_path / "x.parquet")


def test_an_image_beyond_all_limits_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "LARGEST", 1000)
    pq.write_table(pa.table({"image": [jpeg(1), bytes(1001)]}), tmp_path / "x.parquet")
    found = find_source("parquet", tmp_path / "x.parquet")
    assert [len(data) > 0 for _, data in fetch(table(found.listing().items), found.read)] == [True, False]


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
