"""`eagleray embed`: a row for each sample in the order of the index, continued where it was killed, and used again."""

import json
import shutil
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas
import pyarrow.parquet as pq
import pytest
from helpers import forked
from helpers.bucket import CountingBucket
from helpers.commands import refused
from torch.utils.data import get_worker_info

import eagleray
from eagleray.base.errors import UserError
from eagleray.cli.demo import pictures
from eagleray.data import sample_table
from eagleray.data.index import open_index
from eagleray.datasets.shards import Sample, write_shards
from eagleray.evaluation import embed as embedding
from eagleray.evaluation import extraction
from eagleray.evaluation.embed import Part, embed_part
from eagleray.evaluation.target import Inputs, load_target
from eagleray.protocols import image_batches
from eagleray.protocols.image_batches import Reading
from eagleray.storage import store

BACKBONE = "untrained:test_vit"
SIZES: dict[str, Any] = {"size": 32, "resize": 32}
BROKEN = 70  # the number of the image that does not decode


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sample_table, "ROWS", 64)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of 200 images, of which one does not decode."""
    folder = tmp_path_factory.mktemp("given") / "shards"
    samples = list(pictures(0, 200))
    samples[BROKEN] = Sample(samples[BROKEN].key, "jpg", b"no image", samples[BROKEN].label)
    write_shards(samples, str(folder), size=60_000)
    return folder


@pytest.fixture
def shards(given: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(given, tmp_path / "shards"))


def files(folder: Path | str) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in Path(folder).iterdir()}


def test_a_row_for_each_sample_in_the_order_of_the_index(shards: Path, tmp_path: Path):
    folder = eagleray.embed(BACKBONE, shards, tmp_path / "out", **SIZES)
    assert sorted(files(folder)) == sorted([sample_table.ABOUT, *(f"part-{n:06d}.parquet" for n in range(4))])
    table, index = pandas.read_parquet(folder), open_index(str(shards))
    assert len(index.shards) > 2
    assert table["key"].tolist() == [index.key(i) for i in range(200)]
    assert table["label"].tolist() == index.label.tolist()
    assert table["shard"].tolist() == [index.shards[s].url.rpartition("/")[2] for s in index.shard]
    assert np.flatnonzero(table["feature"].isna()).tolist() == [BROKEN]
    backbone, settings = eagleray.load(BACKBONE), sample_table.read_about(folder).settings
    alone = embedding.features_of(backbone, index, np.arange(3, 9), settings, "fp32")[0]
    np.testing.assert_allclose(np.stack(table["feature"][3:9]), alone, atol=1e-5)


def test_duckdb_reads_the_features(shards: Path, tmp_path: Path):
    """With the statement of docs/select.md: what is most like an image."""
    folder = eagleray.embed(BACKBONE, shards, tmp_path / "out", **SIZES)
    page = (Path(__file__).parents[2] / "docs" / "select.md").read_text()
    statement = page.partition('duckdb.sql("""')[2].partition('""")')[0].replace("features/part", f"{folder}/part")
    table, index = pandas.read_parquet(folder), open_index(str(shards))
    found = duckdb.sql(statement.replace("000123", index.key(5))).fetchall()
    features = np.stack([x if x is not None else np.zeros(len(table["feature"][0])) for x in table["feature"]])
    features /= np.linalg.norm(features, axis=1, keepdims=True).clip(1e-12)
    similarity = features @ features[5]
    assert found[0][1] == index.key(5)
    assert [value for *_, value in found] == pytest.approx(np.sort(similarity)[::-1][: len(found)].tolist(), abs=1e-5)
    assert len(found) == 10


def test_what_was_killed_ends_with_the_same_bytes(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole = files(eagleray.embed(BACKBONE, shards, tmp_path / "whole", **SIZES))
    done: list[int] = []

    def dies(*args: Any, **keys: Any) -> int:
        if len(done) in (1, 3):
            done.append(-1)
            raise KeyboardInterrupt
        done.append(embed_part(*args, **keys))
        return done[-1]

    monkeypatch.setattr(embedding, "embed_part", dies)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            eagleray.embed(BACKBONE, shards, tmp_path / "out", **SIZES)
    again = eagleray.embed(BACKBONE, shards, tmp_path / "out", **SIZES)
    assert done == [0, -1, 1, -1, 2, 3]
    assert files(again) == whole
    eagleray.embed(BACKBONE, shards, tmp_path / "out", **SIZES)
    assert len(done) == 6  # nothing is left to do


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_process_that_is_killed_twice_ends_with_the_same_bytes(shards: Path, tmp_path: Path):
    whole, out = files(eagleray.embed(BACKBONE, shards, tmp_path / "whole", **SIZES)), tmp_path / "out"
    code = (
        "import eagleray\nfrom eagleray.data import sample_table\nsample_table.ROWS = 64\n"
        f"eagleray.embed({BACKBONE!r}, {str(shards)!r}, {str(out)!r}, **{SIZES!r})"
    )
    command = [sys.executable, "-c", code]
    for parts in 1, 2:
        process = forked.Popen(command)
        while len(list(out.glob("part-*.parquet"))) < parts:
            assert process.poll() is None
        process.kill()
        assert process.wait(60) == -signal.SIGKILL
        assert len(list(out.glob("part-*.parquet"))) < 4
    forked.run(command, check=True)
    assert files(out) == whole


def test_workers_write_the_same(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole = files(eagleray.embed(BACKBONE, shards, tmp_path / "whole", **SIZES))

    def backwards(function: Any, parts: list[Part], **_: Any) -> Iterator[int]:
        return map(function, parts[::-1])

    monkeypatch.setattr(embedding, "ray_map", backwards)
    assert files(eagleray.embed(BACKBONE, shards, tmp_path / "out", workers=2, **SIZES)) == whole


def test_a_task_with_a_gpu_computes_several_parts_and_none_again(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Ray starts a process for each such task."""
    sizes: list[int] = []

    def twice(function: Any, groups: list[list[Part]], **_: Any) -> Iterator[list[int]]:
        sizes.extend(map(len, groups))
        for parts in groups:
            function(parts[:1])  # by a process that died after its first part
            yield function(parts)

    def once(*args: Any, **keys: Any) -> int:
        done.append(embed_part(*args, **keys))
        return done[-1]

    done: list[int] = []
    monkeypatch.setattr(embedding, "embed_part", once)
    monkeypatch.setattr(embedding, "ray_map", twice)
    monkeypatch.setattr(Inputs, "load", lambda _: load_target(BACKBONE).backbone)
    monkeypatch.setattr(sample_table, "ROWS", 8)
    eagleray.embed(BACKBONE, shards, tmp_path / "out", workers=1, gpus=True, **SIZES)
    assert max(sizes) > 1
    assert done == list(range(len(done)))
    assert sum(sizes) == len(done)


@pytest.mark.usefixtures("copied_loaders")
def test_loader_processes_read_the_same(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As beside a GPU."""
    whole = files(eagleray.embed(BACKBONE, shards, tmp_path / "whole", **SIZES))
    before = eagleray.evaluate(BACKBONE, train=shards, protocols=["knn"], out=tmp_path / "a", **SIZES)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    monkeypatch.setattr(Reading, "beside", lambda device: Reading(workers=2))
    monkeypatch.setattr(image_batches, "ThreadPoolExecutor", in_loader)
    assert files(eagleray.embed(BACKBONE, shards, tmp_path / "out", **SIZES)) == whole
    after = eagleray.evaluate(BACKBONE, train=shards, protocols=["knn"], out=tmp_path / "b", **SIZES)
    assert dict(after) == dict(before)


def in_loader(threads: int) -> ThreadPoolExecutor:
    assert get_worker_info() is not None, "read in the process of the backbone"
    return ThreadPoolExecutor(threads)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ray_tasks_write_the_same(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sample_table, "ROWS", 16_384)  # in the workers it is not changed
    whole = files(eagleray.embed(BACKBONE, shards, tmp_path / "whole", **SIZES))
    assert files(eagleray.embed(BACKBONE, shards, tmp_path / "out", workers=2, **SIZES)) == whole


def test_in_a_store_as_in_a_folder(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(store.STORES, "s3", CountingBucket(tmp_path))
    there = eagleray.embed(BACKBONE, "s3://shards", **SIZES)
    assert there.startswith("s3://shards/embeddings/untrained-timm-test_vit-")
    here = eagleray.embed(BACKBONE, shards, tmp_path / "out", **SIZES)
    parts = files(tmp_path / there.removeprefix("s3://"))
    assert {n: b for n, b in parts.items() if "part" in n} == {n: b for n, b in files(here).items() if "part" in n}


def test_evaluations_use_it(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def scores(name: str) -> dict[str, float]:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
        return dict(eagleray.evaluate(BACKBONE, train=shards, protocols=["knn"], out=tmp_path / name, **SIZES))

    before = scores("alone")
    eagleray.embed(BACKBONE, shards, **SIZES)
    with monkeypatch.context() as patch:
        patch.setattr(extraction, "extract_features", lambda *_, **__: pytest.fail("extracted again"))
        assert scores("embedded") == pytest.approx(before, abs=1.0)
    place = next((shards / "embeddings").iterdir())
    (place / "part-000002.parquet").unlink()
    assert scores("incomplete") == before  # it is not used
    eagleray.embed(BACKBONE, shards, **SIZES)
    about = json.loads((place / sample_table.ABOUT).read_text())
    (place / sample_table.ABOUT).write_text(json.dumps(about | {"data": "other"}))
    assert scores("other data") == before


def test_a_damaged_part_is_named(shards: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    folder = eagleray.embed(BACKBONE, shards, **SIZES)
    for harm in (b"damaged", b""):
        (part := Path(folder) / "part-000001.parquet").write_bytes(harm)
        with pytest.raises(UserError, match=r"part-000001\.parquet: missing or damaged; delete it"):
            eagleray.evaluate(BACKBONE, train=shards, protocols=["knn"], out=tmp_path, **SIZES)
    pq.write_table(pq.read_table(Path(folder) / "part-000000.parquet").slice(1), part)
    with pytest.raises(UserError, match=r"63 rows of feature, not as _table\.json says"):
        eagleray.evaluate(BACKBONE, train=shards, protocols=["knn"], out=tmp_path, **SIZES)


def test_what_is_there_is_never_replaced(shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "out"
    eagleray.embed(BACKBONE, shards, out, **SIZES)
    before = files(out)
    common = ("--resize", "32", "--size", "32")
    line = refused(capsys, "embed", "untrained:vit_tiny_patch16_224", str(shards), f"out={out}")
    assert "has a table of digest=" in line
    assert "(features of untrained:timm:test_vit); out=FOLDER names another place" in line
    line = refused(capsys, "embed", BACKBONE, str(shards), f"out={out}", "--resize", "40", "--size", "32")
    assert "has a table of resize=32 (features of untrained:timm:test_vit); out=FOLDER" in line
    write_shards(pictures(1, 10), str(tmp_path / "others"), size=60_000)
    line = refused(capsys, "embed", BACKBONE, str(tmp_path / "others"), f"out={out}", *common)
    assert "has a table of other images (200, here 10)" in line
    assert files(out) == before


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("features/",), "features/: expected out=FOLDER"),
        (("out=",), "out=: expected out=FOLDER"),
        (("--features", "last5"), "--features last5: unknown; did you mean 'last4'?"),
        (("out=/proc/no/folder",), "out=/proc/no/folder: cannot be written"),
        (("--size", "40"), "--resize 32: smaller than the crop of --size 40"),
        (("--gpus",), "--gpus: is for the Ray tasks of --workers N; without them"),
    ],
)
def test_wrong_input_is_one_line(words: tuple[str, ...], line: str, shards: Path, capsys: pytest.CaptureFixture[str]):
    assert line in refused(capsys, "embed", BACKBONE, str(shards), "--size", "32", "--resize", "32", *words)


def test_missing_data_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert f"{tmp_path}/nowhere" in refused(capsys, "embed", BACKBONE, str(tmp_path / "nowhere"))
