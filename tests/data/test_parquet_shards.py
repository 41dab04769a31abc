"""Parquet files are read as exactly as tars, whoever wrote them; what is left out of them is counted and named."""

import json
import os
import re
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers.bucket import CountingBucket
from helpers.parquet import write_bytes, write_hub
from helpers.pictures import jpeg, sample, spoiled, write_tar
from hypothesis import given, settings
from hypothesis import strategies as st

from eagleray.base.errors import UserError
from eagleray.config.source import Source
from eagleray.config.view import View
from eagleray.data import index_file, parquet_blocks, parquet_shard
from eagleray.data.blocks import Block, Fetcher
from eagleray.data.decode import decode
from eagleray.data.index import Index, open_index, write_index
from eagleray.data.index_faults import faults_of
from eagleray.data.order import lanes_of
from eagleray.data.reader import StepPart, Stream
from eagleray.protocols.probes import class_names
from eagleray.storage import store
from eagleray.storage.blob import Blob
from eagleray.storage.block_cache import Cache
from eagleray.storage.store import LocalStore
from eagleray.views.sampling import Views

VIEWS = Views.of([View(size=16, count=2, blur=0.5)])
CODECS = ("none", "snappy", "gzip", "brotli", "zstd", "lz4")
WRITTEN = Path(__file__).with_name("written_by_datasets.parquet")
PAGES = {"write_batch_size": 20, "data_page_size": 10_000, "dictionary_pagesize_limit": 10_000}
DELTA = {"use_dictionary": False, "column_encoding": {"jpg": "DELTA_LENGTH_BYTE_ARRAY"}}


def opened(url: Any, **options: Any) -> Index:
    return open_index(url, note=lambda _: None, **options)


def pictures(first: int, count: int) -> list[tuple[bytes, int]]:
    return [(jpeg(number), number % 10) for number in range(first, first + count)]


def images(index: Index) -> list[bytes]:
    return [bytes(index.read(sample, sample + 1)) for sample in range(len(index))]


def batches(index: Index, *, readers: int, start: int, steps: int, lanes: int = 6, cache: Any = None) -> list[Any]:
    stream = Stream(index, VIEWS, 7, lanes, 12, cache)
    own = [lanes_of(lanes, reader=reader, readers=readers) for reader in range(readers)]
    parts = islice(zip(*[stream.parts(each, start=start) for each in own], strict=True), steps)
    return [tensors(part) for step in parts for part in step]


def tensors(part: StepPart) -> tuple[list[torch.Tensor], list[Any]]:
    assert part.error is None
    return [*part.pixels, part.params, part.index, part.label], [(b.key, b.reason) for b in part.bad]


def assert_equal(ours: list[Any], theirs: list[Any]) -> None:
    assert len(ours) == len(theirs)
    for (mine, bad), (wanted, other) in zip(ours, theirs, strict=True):
        assert bad == other
        assert all(torch.equal(a, b) for a, b in zip(mine, wanted, strict=True))


@settings(max_examples=12, deadline=None)
@given(
    sizes=st.lists(st.integers(13, 40), min_size=1, max_size=3),
    rows=st.integers(1, 50),
    codec=st.sampled_from(CODECS),
    dictionary=st.booleans(),
    version=st.sampled_from(["1.0", "2.0"]),
    hub=st.booleans(),
    readers=st.integers(1, 4),
    start=st.integers(0, 5),
)
def test_batches_are_those_of_tars_whose_blocks_hold_the_same(
    sizes: list[int], rows: int, codec: str, dictionary: bool, version: str, hub: bool, readers: int, start: int
):
    """However the images are packed, a block of small row groups has the images of a small tar."""
    with tempfile.TemporaryDirectory() as name:
        folder, first = Path(name), 0
        options = {"compression": codec, "use_dictionary": dictionary, "data_page_version": version}
        for shard, count in enumerate(sizes):
            keys = range(first, first + count)
            write_tar(folder / "tars" / f"x-{shard}.tar", [m for key in keys for m in sample(key)])
            write = write_hub if hub else write_bytes
            write(folder / "files" / f"x-{shard}.parquet", pictures(first, count), row_group_size=rows, **options)
            first += count
        tars, files = opened(str(folder / "tars")), opened(str(folder / "files"))
        assert tars.block_sizes.tolist() == files.block_sizes.tolist() == sizes
        assert images(tars) == images(files)
        given = {"start": start, "steps": 4}
        assert_equal(batches(files, readers=readers, **given), batches(tars, readers=readers, **given))


@pytest.mark.parametrize("options", [{}, {"use_dictionary": False}, DELTA, {"data_page_version": "2.0"}], ids=str)
def test_a_large_row_group_is_divided_between_its_pages(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As pandas and pyarrow write them: all images in one row group, a thousand to a page."""
    monkeypatch.setattr(parquet_blocks, "BLOCK", 40_000)
    rows = pictures(0, 240)
    write_bytes(tmp_path / "x.parquet", rows, **PAGES, **options)
    index = opened(str(tmp_path))
    assert len(index.block_sizes) >= 4
    assert index.block_sizes.sum() == 240
    assert images(index) == [image for image, _ in rows]
    first, last = int(index.starts[1]) - 3, int(index.starts[2]) + 3  # of three blocks
    assert bytes(index.read(first, last)) == b"".join(image for image, _ in rows[first:last])
    assert index.label.tolist() == [label for _, label in rows]


def test_images_that_repeat_are_unpacked_for_every_row(tmp_path: Path):
    """A dictionary has them once."""
    rows = [(jpeg(number % 7), number % 7) for number in range(100)]
    write_bytes(tmp_path / "x.parquet", rows)
    assert (tmp_path / "x.parquet").stat().st_size < 20_000
    assert images(opened(str(tmp_path))) == [image for image, _ in rows]


def test_files_of_pandas_and_duckdb(tmp_path: Path):
    rows = pictures(0, 50)
    frame = pandas.DataFrame({"image": [image for image, _ in rows], "label": [label for _, label in rows]})
    frame["label"] = frame["label"].astype("float64").where(frame["label"] > 0)  # one that is missing makes floats
    (tmp_path / "pandas").mkdir()
    (tmp_path / "duckdb").mkdir()
    frame.to_parquet(tmp_path / "pandas" / "x.parquet")
    duckdb.from_df(frame).write_parquet(str(tmp_path / "duckdb" / "x.parquet"), compression="zstd")
    wanted = [label or -1 for _, label in rows]
    for name in ("pandas", "duckdb"):
        index = opened(str(tmp_path / name))
        assert images(index) == [image for image, _ in rows]
        assert index.label.tolist() == wanted
        assert index.key(7) == "7"


def test_classes_have_the_names_that_datasets_writes(tmp_path: Path):
    write_hub(tmp_path / "x.parquet", pictures(0, 30), classes=["cat", "dog"])
    index = opened(str(tmp_path))
    assert class_names(index) == {0: {"cat"}, 1: {"dog"}}
    assert index.key(3) == "x-3.jpg"


def test_a_file_that_datasets_has_written():
    """By version 5.2.0, which is no requirement here: six images of three classes."""
    table = parquet_shard.scan(Blob(str(WRITTEN), WRITTEN.stat().st_size))
    known = json.loads(table.schema.metadata[b"parquet"])
    assert (known["image"], known["label"], known["classes"]) == ("image", "label", ["cat", "dog", "owl"])
    assert table["label"].to_pylist() == [0, 1, 2, 0, 1, 2]
    data = parquet_shard.read(Blob(str(WRITTEN), 0), known, 0, known["ends"][-1], 1.0)
    for offset, size in zip(table["offset"].to_pylist(), table["size"].to_pylist(), strict=True):
        assert decode(data[offset : offset + size]).shape[1] == 8


def test_what_is_left_out_is_counted_and_named(tmp_path: Path):
    rows: list[Any] = pictures(0, 40)
    rows[3:6] = [(None, 1), (b"", 2), (None, None)]
    write_hub(tmp_path / "a.parquet", rows, row_group_size=10)
    write_bytes(tmp_path / "b.parquet", rows, column="image", row_group_size=10)
    (tmp_path / "c.parquet").write_bytes(b"PAR1 but then nothing")
    whole = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "d.parquet").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "_metadata.parquet").write_bytes(whole)
    (tmp_path / "notes.txt").write_text("nothing")
    [(place, usable, bad)] = write_index(str(tmp_path))
    assert (place, usable, bad) == (str(tmp_path / "_eagleray.index"), 74, 4)
    lines = list(faults_of(place).lines())
    assert lines[:2] == [
        "not used  2: no image: only a null cell (3 in b.parquet, 5 in b.parquet)",
        "not used  2: no image: only the path of one (a-3.jpg in a.parquet, a-5.jpg in a.parquet)",
    ]
    assert lines[2].startswith("not used  2: not a Parquet file: ")
    assert lines[2].endswith("(the shard in c.parquet, the shard in d.parquet)")
    assert lines[3:] == ["not used  2: the image has no bytes (a-4.jpg in a.parquet, 4 in b.parquet)"]
    notes: list[str] = []
    index = open_index(str(tmp_path), note=notes.append)
    assert notes == [f"{tmp_path}: not read: 1 .txt"]
    assert images(index) == 2 * [image for image, _ in rows if image]
    assert index.label.tolist() == 2 * [label for image, label in rows if image]


def test_broken_images_are_replaced_as_in_tars(tmp_path: Path):
    rows = [(spoiled(n) if n in (5, 9) else jpeg(n), 0) for n in range(36)]
    write_hub(tmp_path / "x.parquet", rows)
    seen = [bad for _, bad in batches(opened(str(tmp_path)), readers=1, start=0, steps=3)]
    assert sorted({key for each in seen for key, _ in each}) == ["x-5.jpg", "x-9.jpg"]


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (
            {"a": pa.binary(), "b": pa.binary()},
            "columns a, b may all be meant; choose one with '{url: ..., image: a}'",
        ),
        ({"text": pa.string()}, "no column holds the bytes of images; the columns are text (string)"),
        ({"image": pa.list_(pa.binary())}, "no column holds the bytes of images; the columns are image (list<"),
        ({"jpg": pa.binary(), "cls": pa.int8(), "class": pa.int8()}, "--label cls`, or label=none"),
        (
            {"image": pa.binary(), "label": pa.float32()},
            "label=label: holds 0.5; expected whole numbers, or",
        ),
    ],
    ids=["two images", "none", "lists", "two labels", "no classes"],
)
def test_columns_that_are_not_clear_are_one_line(columns: dict[str, pa.DataType], line: str, tmp_path: Path):
    values: dict[str, Any] = {"binary": b"x", "string": "x", "int8": 1, "float": 0.5}
    cells = {n: pa.array([values.get(str(kind), [b"x"])], kind) for n, kind in columns.items()}
    pq.write_table(pa.table(cells), tmp_path / "x.parquet")
    with pytest.raises(UserError) as e:
        opened(str(tmp_path))
    assert line in str(e.value)
    assert "\n" not in str(e.value)


def test_columns_that_are_said_are_taken_and_remembered(tmp_path: Path):
    rows = pictures(0, 20)
    cells = {"photo": [i for i, _ in rows], "mask": [b"x"] * 20, "cls": [n for _, n in rows], "target": [3] * 20}
    pq.write_table(pa.table(cells), tmp_path / "x.parquet")
    pq.write_table(pa.table(cells), tmp_path / "y.parquet")
    for named, said in (
        ({"label": "photo"}, "label=photo: holds no numbers; the columns are photo (binary), "),
        ({"image": "cls"}, "image=cls: holds no bytes; the columns are photo (binary), "),
        ({"image": "foto"}, "image=foto: no such column; the columns are photo (binary), "),
    ):
        with pytest.raises(UserError, match=re.escape(said)):
            write_index([Source(url=str(tmp_path), **{"image": "photo", **named})])
    with pytest.raises(UserError, match="columns cls, target may all be meant"):
        opened(str(tmp_path / "x.parquet"))
    said = Source(url=str(tmp_path / "x.parquet"), image="photo", label="target")
    assert set(opened([said]).label.tolist()) == {3}
    assert set(opened(str(tmp_path)).label.tolist()) == {3}  # also of the other file, which was not indexed
    with pytest.raises(UserError, match=f"indexed with label=target; `eagleray index {tmp_path} --label cls` reads it"):
        opened([Source(url=str(tmp_path), label="cls")])
    write_index([Source(url=str(tmp_path), label="none", image="photo")])
    assert not opened(str(tmp_path)).labelled
    write_tar(tmp_path / "tars" / "x.tar", sample(0))
    with pytest.raises(UserError, match="image and label name columns of Parquet files"):
        opened([Source(url=str(tmp_path / "tars"), label="cls")])


def test_a_page_that_is_too_large_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(parquet_blocks, "LARGEST_BLOCK", 2**20)
    monkeypatch.setattr(parquet_blocks, "BLOCK", 2**17)
    pq.write_table(pa.table({"image": [os.urandom(2**18)] * 3 + [os.urandom(2**20)]}), tmp_path / "x.parquet")
    with pytest.raises(UserError, match=r"pages of \d MiB, more than 1, .*`eagleray prepare parquet .*x.parquet DST`"):
        opened(str(tmp_path))


def test_a_dictionary_that_unpacks_to_gigabytes_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A few bytes say that each of a million rows is the same large image."""
    monkeypatch.setattr(parquet_blocks, "MOST_AT_ONCE", 2**22)
    image = bytes(2**20)
    cells = pa.DictionaryArray.from_arrays(pa.array(np.zeros(10**6, np.int32)), pa.array([image]))
    pq.write_table(pa.table({"image": cells}), tmp_path / "x.parquet", store_schema=False, compression="zstd")
    with pytest.raises(UserError, match="images, which repeat those of a dictionary"):
        opened(str(tmp_path))


def test_a_changed_file_is_refused_and_one_that_changes_later_is_broken_samples(tmp_path: Path):
    path = write_hub(tmp_path / "x.parquet", pictures(0, 36), compression="zstd")
    whole, index = path.read_bytes(), opened(str(tmp_path))
    path.write_bytes(changed := whole[:5000] + bytes(100) + whole[5100:])
    with pytest.raises(UserError, match=f"changed since it was indexed.*`eagleray index {tmp_path}` accepts"):
        opened(str(tmp_path))
    bad = {key: why for _, found in batches(index, readers=1, start=0, steps=3) for key, why in found}
    assert 1 <= len(bad) <= 2
    assert all("its bytes have changed since it was indexed" in why for why in bad.values())
    path.write_bytes(changed[:4] + bytes(9) + changed[13:])  # no page can be read any more
    [step] = Stream(index, VIEWS, 7, 6, 12).parts(range(6), start=0, stop=1)
    assert "no usable image is left in a whole lane of the data" in str(step.error)
    assert "its bytes have changed since it was indexed" in str(step.error)


def test_bytes_that_changed_on_the_way_are_read_again_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Although lanes share the unpacked images of a block while they use them."""
    write_hub(tmp_path / "x.parquet", pictures(0, 36), compression="zstd")
    index, honest, reads = opened(str(tmp_path)), LocalStore.read, list[int]()
    wanted = images(index)

    def read(self: LocalStore, url: str, start: int, length: int, **more: Any) -> memoryview:
        data = honest(self, url, start, length, **more)
        if not reads:
            data[length // 2] ^= 255
        reads.append(length)
        return data

    monkeypatch.setattr(LocalStore, "read", read)
    block = Block(Fetcher(index, cache=None), np.arange(36))
    assert [bytes(block.bytes(sample)) for sample in range(36)] == wanted
    assert len(reads) == 2


def test_a_moved_folder_is_known_and_a_file_that_went_is_missed(tmp_path: Path):
    write_hub(tmp_path / "one" / "x.parquet", pictures(0, 20))
    write_hub(tmp_path / "one" / "y.parquet", pictures(20, 20))
    before = images(opened(str(tmp_path / "one")))
    (tmp_path / "one").rename(tmp_path / "other")
    notes: list[str] = []
    assert images(open_index(str(tmp_path / "other"), note=notes.append)) == before
    assert notes == []
    (tmp_path / "other" / "x.parquet").unlink()
    with pytest.raises(UserError, match=r"x\.parquet: is indexed, but no longer exists"):
        opened(str(tmp_path / "other"))


def test_a_block_is_one_request_and_is_shared_by_lanes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    bucket = CountingBucket(tmp_path)
    monkeypatch.setitem(store.STORES, "s3", bucket)
    write_hub(tmp_path / "set" / "x.parquet", pictures(0, 120), row_group_size=60)
    index = opened("s3://set/*.parquet")
    assert index.block_sizes.tolist() == [120]
    bucket.lengths.clear()
    reads: list[int] = []
    monkeypatch.setattr(parquet_shard, "unpack", lambda *a: reads.append(1) or parquet_blocks.unpack(*a))
    held = [index.read(first, first + 20) for first in range(0, 120, 20)]
    assert len(held) == 6
    assert len(reads) == len(bucket.lengths) == 1
    cache = Cache(tmp_path / "cache", 2**30)
    first = batches(index, readers=2, start=0, steps=10, cache=cache)
    bucket.lengths.clear()
    assert_equal(batches(index, readers=2, start=0, steps=10, cache=cache), first)
    assert bucket.lengths == []


def test_an_index_of_our_own_is_no_data_and_tars_go_first(tmp_path: Path):
    write_tar(tmp_path / "x.tar", sample(0))
    write_bytes(tmp_path / "table.parquet", pictures(5, 3))
    assert len(opened(str(tmp_path))) == 1
    assert len(opened(str(tmp_path / "*.parquet"))) == 3
    assert {index_file.NAME, index_file.PARQUET_NAME} <= set(os.listdir(tmp_path))
    assert len(opened(str(tmp_path))) == 1
