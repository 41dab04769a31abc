"""Folders whose names a glob or a brace pattern would read, or whose bytes are not UTF-8: indexed, sharded and read."""

import os
from pathlib import Path

import pytest
from helpers.pictures import jpeg

from eagleray.base.errors import UserError
from eagleray.data.columns import files_of
from eagleray.data.index import list_data, open_index, write_index
from eagleray.datasets.describe import describe
from eagleray.datasets.shards import Sample, write_shards
from eagleray.storage import store

NAMES = ["Album [2019]", "what?", "x.tar", "{a,b}", "a{1..2}*", os.fsdecode(b"latin\xe9"), "[x]", "no}t"]


def pictures(folder: Path) -> Path:
    for kind in ("a", "b"):
        (folder / kind).mkdir(parents=True)
        for n in range(4):
            (folder / kind / f"p{n}.jpg").write_bytes(jpeg(n))
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_of_images_may_have_any_name(tmp_path: Path, name: str) -> None:
    folder = str(pictures(tmp_path / name))
    assert write_index(folder) == [(f"{folder}/index.parquet", 8, 0)]
    spare = tmp_path / os.fsdecode(b"spare\xe9")
    index = open_index([folder], spare, note=lambda _: None)
    assert (len(index), index.labelled) == (8, True)
    assert len(bytes(index.read(0, 8))) == index.size.sum()
    assert describe(folder, spare)[0]["images"] == 8


@pytest.mark.parametrize("name", NAMES)
def test_shards_are_read_where_they_were_written(tmp_path: Path, name: str) -> None:
    folder = str(tmp_path / name)
    write_shards([Sample(f"s{n}", "jpg", jpeg(n), n % 2) for n in range(6)], folder, size=2000)
    there = sorted(p for p in os.listdir(folder) if p.endswith(".tar"))
    assert len(there) > 1
    for url in (folder, f"{folder}/", f"{folder}/*.tar"):
        assert [b.url.rpartition("/")[2] for b in list_data(url).blobs] == there
    assert write_index(folder) == [(f"{folder}/index.parquet", 6, 0)]
    assert len(open_index(f"{folder}/{there[0]}", note=lambda _: None)) < 6
    assert describe(folder, tmp_path)[0]["images"] == 6


def test_a_folder_of_images_may_have_one_called_like_a_shard_in_it(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "photos")
    (folder / "a").rename(folder / "a.tar")
    assert write_index(str(folder))[0][1] == 8


def test_a_table_of_columns_may_have_any_name(tmp_path: Path) -> None:
    (tmp_path / "t [1].csv").write_text("key,x\na,1\n")
    (tmp_path / "t 1.csv").write_text("key,x\na,1\n")
    assert files_of(f"{tmp_path}/t [1].csv") == [f"{tmp_path}/t [1].csv"]
    assert files_of(f"{tmp_path}/t ?.csv") == [f"{tmp_path}/t 1.csv"]


@pytest.mark.parametrize("query", ["?download=true", "?a=b&c=d"])
def test_a_query_of_a_web_server_is_named(query: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store.STORES["https"], "list", lambda url, start="", patience=0.0: [])
    url = "https://host/set/00000.tar"
    with pytest.raises(UserError, match=f"queries are not sent: expected {url}$"):
        list_data(url + query)
