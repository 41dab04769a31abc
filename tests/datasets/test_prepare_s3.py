"""`eagleray prepare` from and to a real S3 server: OpenStack Swift on loopback."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.layouts import fill, prepare_error, read_tree, run_prepare, tar_bytes, write_parquet
from helpers.pictures import jpeg
from helpers.s3.server import store_of

from eagleray.data.index import open_index
from eagleray.storage import store


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with store_of(tmp_path_factory.mktemp("s3"), "prepare"):
        yield "s3://prepare"


def upload(folder: Path, url: str) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            store.store(url).put(f"{url}/{path.relative_to(folder)}", path)


def downloaded(url: str, folder: Path) -> dict[str, bytes]:
    for blob in store.store(url).list(url + "/"):
        folder.mkdir(exist_ok=True)
        (folder / blob.url.rpartition("/")[2]).write_bytes(bytes(store.store(url).get(blob.url)))
    return read_tree(folder)


@pytest.mark.parametrize(
    "source", [pytest.param("imagenet-22k", marks=pytest.mark.slow), "folder", "parquet", "webdataset"]
)
def test_s3_holds_what_a_folder_would(bucket: str, tmp_path: Path, source: str):
    """Sources with folders, archives in archives and Parquet files; what is left behind are shards, index and card."""
    here = tmp_path / "in"
    if source == "parquet":
        write_parquet(here / "a.parquet", 0, 9)
    elif source == "folder":
        fill(here, [f"{c}/{i}.jpg" for c in "ab" for i in range(5)])
    else:
        here.mkdir()
        tars = {f"n0000000{c}.tar": tar_bytes({f"{c}{i}.jpg": jpeg(10 * c + i) for i in range(5)}) for c in range(2)}
        (here / "whole.tar").write_bytes(tar_bytes(tars))
        if source == "webdataset":
            (here / "whole.tar").write_bytes(tars["n00000000.tar"])
    upload(here, f"{bucket}/{source}")
    origin = "whole.tar" if source == "imagenet-22k" else ""
    run_prepare(source, here / origin if origin else here, tmp_path / "out", dedup=True)
    url = f"{bucket}/{source}" + (f"/{origin}" if origin else "")
    run_prepare(source, url, f"{bucket}/out-{source}", dedup=True)
    ours, theirs = read_tree(tmp_path / "out"), downloaded(f"{bucket}/out-{source}", tmp_path / "back")
    assert ours.keys() == theirs.keys()
    assert {k: v for k, v in ours.items() if k.endswith(".tar")} == {
        k: v for k, v in theirs.items() if k[-4:] == ".tar"
    }
    assert len(open_index(f"{bucket}/out-{source}", note=lambda _: pytest.fail("is indexed again"))) >= 5
    left = [b.url for b in store.store(bucket).list(f"{bucket}/out-{source}/.prepare/")]
    assert left == []
    assert run_prepare(source, url, f"{bucket}/out-{source}", dedup=True)["images"] >= 5, "and is done already"


def test_a_bucket_that_is_not_there_is_one_line(bucket: str, tmp_path: Path):
    fill(tmp_path / "in", ["a.jpg"])
    assert "s3://none" in prepare_error("folder", tmp_path / "in", "s3://none/out")
    assert "s3://none" in prepare_error("folder", "s3://none/in", tmp_path / "out")
