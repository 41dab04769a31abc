"""`eagleray curate`: from shards to a recipe and a page, which count every image; nothing is done twice."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from helpers.commands import refused
from helpers.pictures import write_copies

import eagleray
from eagleray.cli.main import app
from eagleray.config.source import Source
from eagleray.curation import cuts
from eagleray.data import sample_table
from eagleray.data.columns import select
from eagleray.data.index import open_index
from eagleray.evaluation import embed

BACKBONE = "untrained:test_vit"


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sample_table, "ROWS", 64)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return write_copies(tmp_path / "shards")


def test_a_recipe_and_a_page_that_count_every_image(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "curated"
    app(["curate", str(shards), BACKBONE, f"out={out}"], standalone_mode=False)
    said = dict(
        line.split(": ") for line in capsys.readouterr().out.splitlines() if re.match(r"[a-z ]+: [\d/]\S*$", line)
    )
    numbers = {name: int(value.replace(",", "")) for name, value in said.items() if value[0].isdigit()}
    assert list(numbers) == ["images", *cuts.CUTS, "outliers", "left", "balance"]
    assert numbers["images"] == 128 == sum(numbers[name] for name in (*cuts.CUTS, "outliers", "left"))
    assert numbers["damaged"] == 1
    assert numbers["near copies"] >= 16
    assert said["recipe"], said["page"] == (str(out / "curate.yaml"), str(out / "curate.html"))

    text = (out / "curate.yaml").read_text()
    train = yaml.safe_load(text)["data"]["train"]
    index = open_index(str(shards))
    chosen = select(replace(index, sources=[Source(**train)] * len(index.shards)))
    assert chosen is not None
    assert (chosen.weight > 0).sum() == numbers["left"]
    assert int(chosen.weight.sum()) == pytest.approx(numbers["balance"], abs=1)
    comments = [line for line in text.splitlines() if line.startswith("# ")]
    assert [line[2:].partition(":")[0] for line in comments] == [*cuts.CUTS, "outliers"]
    assert ("min_side" in train["where"]) == ("is not made" not in comments[4])

    page = (out / "curate.html").read_text()
    assert re.findall(r"<h2>(.*?)</h2>", page)[:2] == ["Left out", "Preview"]
    assert "Images that are near copies" in page

    before = {path: path.stat().st_mtime_ns for path in shards.rglob("part-*")}
    monkeypatch.setattr(embed, "embed_part", None)  # nothing is left to compute
    again = eagleray.curate(shards, BACKBONE, out)
    assert {name: again[name] for name in numbers} == numbers
    assert {path: path.stat().st_mtime_ns for path in shards.rglob("part-*")} == before
    assert (out / "curate.yaml").read_text() == text


def test_a_cut_that_does_not_fit_the_data_is_not_made() -> None:
    out = np.arange(10) < 3
    assert not cuts.cut_of("tiny", "min_side >= 64", out).made
    assert cuts.cut_of("tiny", "min_side >= 64", out & (np.arange(10) < 2)).made
    assert cuts.cut_of("near copies", "duplicate_of is null", out).made
    said = cuts.cut_of("tiny", "min_side >= 64", out).line()
    assert said == "tiny: 3 (30.00%) would be left out by min_side >= 64, so this cut is not made"


def test_wrong_input_is_one_line(shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "curate", str(shards), BACKBONE, "here").endswith("here: expected out=FOLDER")
    assert "expected a path of this machine" in refused(capsys, "curate", str(shards), BACKBONE, "out=s3://b/c")
    said = refused(capsys, "curate", str(shards), str(tmp_path / "none"), f"out={tmp_path / 'o'}")
    assert str(tmp_path / "none") in said
    assert not (shards / "columns").exists(), "the model is looked for before anything is measured"
    assert "--workers" in refused(capsys, "curate", str(shards), BACKBONE, f"out={tmp_path / 'o'}", "--gpus")
    page = tmp_path / "others" / "curate.html"
    page.parent.mkdir()
    page.write_text("<footer>/data/others - written by eagleray report, 2026-11-30 20:00 UTC</footer>")
    said = refused(capsys, "curate", str(shards), BACKBONE, f"out={page.parent}")
    assert said.endswith(f"out: {page}: is there, and is no page about {shards}; give another name")
    eagleray.measure(shards, workers=0)
    features = eagleray.embed(BACKBONE, shards, size=32, resize=32)
    eagleray.find_clusters(features, shards, clusters=[2])
    said = refused(capsys, "curate", str(shards), BACKBONE, f"out={tmp_path / 'o'}")
    assert "features" in said
    assert said.endswith("delete it to begin again")


def test_tables_of_other_images_or_meanings_are_to_be_deleted(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`out` of `curate` is no place for tables, so messages must not advise it."""
    last = max(shards.glob("*.tar"))
    (tmp_path / "shards-2").mkdir()
    shutil.copy(last, tmp_path / "shards-2")
    line = refused(capsys, "curate", both := f"{shards}{{,-2}}/*.tar", BACKBONE, f"out={tmp_path / 'o'}")
    assert re.search(rf"data={re.escape(both)}; the shards are in 2 folders, such as \S+$", line)
    eagleray.measure(shards, workers=0)
    shutil.copy(last, shards / "shard-999999.tar")
    words = "curate", str(shards), BACKBONE, f"out={tmp_path / 'o'}"
    line = refused(capsys, *words)
    assert re.search(r"has a table of other images \(128, here \d+\); delete it to begin again$", line)
    shutil.rmtree(shards / "columns")
    features = eagleray.embed(BACKBONE, shards)
    eagleray.find_clusters(features, shards, shards / "columns" / "mine", clusters=[2])
    assert re.search(
        r"both have a column duplicate_of; delete one of these tables, such as \S+$", refused(capsys, *words)
    )
