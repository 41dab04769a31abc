"""`eagleray data map`: what stands on the page, and what it refuses."""

import re
from pathlib import Path
from typing import Any

import pandas
import pytest
from helpers.commands import refused
from helpers.pictures import write_copies

import eagleray
from eagleray.cli.demo import pictures
from eagleray.cli.main import app
from eagleray.data import sample_table
from eagleray.data.digests import shard_digests
from eagleray.data.index import open_index
from eagleray.data.sample_table import About, SampleTable, complete_tables
from eagleray.datasets.shards import write_shards
from eagleray.reports import data_map

BACKBONE = "untrained:test_vit"


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sample_table, "ROWS", 32)
    monkeypatch.setattr(data_map, "PARTS", 3)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return write_copies(tmp_path / "shards")


def sections(page: str) -> list[str]:
    return re.findall(r"<h2>(.*?)</h2>", page)


def test_a_page_without_any_columns_says_what_would_add_to_it(shards: Path, tmp_path: Path) -> None:
    page = eagleray.data_map(shards, tmp_path / "new" / "data.html").read_text()
    assert sections(page) == []
    for command in ("data measure", "embed MODEL", "data cluster FEATURES"):
        assert f"eagleray {command} {shards}" in page
    assert "96 of 128 images are looked at" in page


def test_everything_that_was_computed_is_shown(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    eagleray.measure(shards, workers=0)
    features = eagleray.embed(BACKBONE, shards, size=32, resize=32)
    eagleray.find_clusters(features, shards, clusters=[4], similar=0.9999)
    out = tmp_path / "data.html"
    capsys.readouterr()
    app(["data", "map", str(shards), "--where", "luma > 100", "--out", str(out)], standalone_mode=False)
    assert capsys.readouterr().out.split() == [str(out)]
    page = out.read_text()
    assert sections(page) == ["Preview", "Map", "Clusters", "Near copies", "Columns"]
    assert "More is shown after" not in page
    sources = re.findall(r'src="(.*?)"', page)
    assert all(source.startswith("data:image/") for source in sources), "the file needs no other"
    kept, left = (int(n) for n in re.findall(r'data-label="Images"><data value="(\d+)">', page))
    [measured] = [path for path in (shards / "columns").iterdir() if path.name != "clusters"]
    luma = pandas.read_parquet(measured)["luma"]
    assert (kept, left) == (int((luma > 100).sum()), 128 - int((luma > 100).sum()))
    for name in ("luma", "sharpness", "entropy", "min_side", "similarity", "balance"):
        assert f"{name}: lowest, " in page
    pairs = re.findall(r"cosine similarity (\d\.\d+): \S+/(\d+)_\w+, and its copy (\d+)", page)
    assert pairs
    assert all(int(copy) == int(first) + 1 and float(similarity) >= 0.9999 for similarity, first, copy in pairs)
    counted = [int(n.replace(",", "")) for n in re.findall(r"cluster \d+: ([\d,]+) images", page)]
    assert counted == sorted(counted, reverse=True)


def test_fields_of_json_are_not_taken_for_clusters(shards: Path, tmp_path: Path) -> None:
    index = open_index(str(shards), note=lambda _: None)

    def add(name: str, settings: dict[str, Any], **columns: Any) -> None:
        about = About("columns", settings, "digest", len(index), shards=shard_digests(index))
        table = SampleTable.create(f"{shards}/columns/{name}", about)
        for part in table.parts:
            table.write(part, index, {c: [value] * len(table.samples(part)) for c, value in columns.items()})

    add("json", {"measures": [], "json": {}}, cluster="cats", cluster_name="cats", duplicate_of="a", similarity=0.25)
    page = eagleray.data_map(shards, tmp_path / "data.html").read_text()
    assert sections(page) == ["Columns"]
    assert "eagleray data cluster FEATURES" in page
    ours = {"cluster": 0, "cluster_size": 128, "centre_similarity": 0.5, "duplicate_of": None, "similarity": 0.75}
    add("clusters", {"clusters": [1]}, **ours)
    assert sections(eagleray.data_map(shards, tmp_path / "data.html").read_text()) == ["Clusters", "Columns"]
    tables = list(complete_tables(index.shards, "columns", lambda _: True))
    assert set(data_map.Data(str(shards), index, tables, None).column("similarity")) == {0.75}


def test_columns_and_features_of_other_images_are_not_shown(shards: Path, tmp_path: Path) -> None:
    eagleray.measure(shards, "size", workers=0)
    eagleray.embed(BACKBONE, shards, size=32, resize=32)
    assert sections(eagleray.data_map(shards, tmp_path / "data.html").read_text()) == ["Map", "Columns"]
    for tar in shards.glob("*.tar"):
        tar.unlink()
    write_shards(pictures(1, 128), str(shards), size=60_000)
    page = eagleray.data_map(shards, tmp_path / "data.html").read_text()
    assert sections(page) == []
    assert f"eagleray data measure {shards}" in page


def test_a_page_about_other_data_is_not_replaced(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    others, out = write_copies(tmp_path / "its & others"), tmp_path / "data.html"
    eagleray.data_map(others, out)
    page = eagleray.data_map(f"{others}/", out).read_text()  # a page about the same data is replaced
    said = refused(capsys, "data", "map", str(shards), "--out", str(out))
    assert said.endswith(f"--out {out}: is there, and is no page about {shards}; give another name")
    assert out.read_text() == page


def test_wrong_input_is_one_line(shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["data", "map", str(shards), "--out", str(tmp_path / "data.html")]
    assert "there are key, shard, label, bytes" in refused(capsys, *command, "--where", "nsfw < 1")
    assert refused(capsys, *command, "--features", str(shards)).endswith(
        "shards: no features; expected a folder that eagleray embed has written"
    )
    (tmp_path / "file").touch()
    said = refused(capsys, "data", "map", str(shards), "--out", str(tmp_path / "file" / "data.html"))
    assert "cannot be written" in said
    said = refused(capsys, "data", "map", str(shards), "--out", "s3://bucket/data.html")
    assert said.endswith("--out s3://bucket/data.html: expected a path of this machine, not a URL")
    assert not (tmp_path / "data.html").exists()
