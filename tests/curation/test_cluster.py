"""`eagleray data cluster`: columns for planted copies and rare subjects, which a recipe chooses by."""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow as pa
import pytest
from helpers.commands import refused
from helpers.ranks import on_ranks
from numpy.typing import NDArray

import eagleray
from eagleray.base import devices, dist
from eagleray.base.errors import UserError
from eagleray.config.source import Source
from eagleray.curation import cluster as clustering
from eagleray.curation import copies, kmeans
from eagleray.curation.cluster import Task
from eagleray.curation.stages import Stages
from eagleray.data import sample_table
from eagleray.data.columns import MEASURED, select
from eagleray.data.digests import data_digest
from eagleray.data.index import open_index
from eagleray.data.sample_table import About, SampleTable
from eagleray.datasets.shards import Sample, write_shards
from eagleray.evaluation.embeddings import COLUMN, WHAT, column_of, read_features

SUBJECTS = (150, 30, 15)  # samples of each; every tenth is a copy of the one before it
DIM = 12
BROKEN = 40  # has no features


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sample_table, "ROWS", 64)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def subject_of(row: NDArray[np.int64] | int) -> Any:
    return np.searchsorted(np.cumsum(SUBJECTS), row, side="right")


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return written(tmp_path / "shards", range(sum(SUBJECTS)))


def written(folder: Path, numbers: Iterable[int]) -> Path:
    """Images of falling size; what is in them does not matter, as the features are given."""
    samples = (Sample(f"{i:06d}", "jpg", b"x" * (2000 - i), int(subject_of(i))) for i in numbers)
    write_shards(samples, str(folder), size=50_000)
    return folder


@pytest.fixture
def features(shards: Path, tmp_path: Path) -> str:
    return embedded(shards, tmp_path / "features")


def embedded(shards: Path, folder: Path, broken: float | None = None) -> str:
    """An embedding in which subjects lie apart, and copies close together."""
    index = open_index(str(shards))
    rows = np.array([int(index.key(i)) for i in range(len(index))])
    x = vectors()
    x[BROKEN] = broken or 0
    settings = {"digest": "d", "kind": "pooled", "dim": DIM, "size": 32, "resize": 32, "precision": "float32"}
    about = About(WHAT, settings, data_digest(index, np.arange(len(index))), len(index))
    table = SampleTable.create(str(folder), about)
    for part in table.parts:
        mine = rows[table.samples(part)]
        table.write(part, index, {COLUMN: column_of(x[mine], (mine != BROKEN) | (broken is not None))})
    return table.folder


def vectors() -> NDArray[np.float32]:
    draw = np.random.default_rng(0)
    x = np.eye(DIM)[subject_of(np.arange(sum(SUBJECTS)))] + draw.normal(0, 0.25, (sum(SUBJECTS), DIM))
    copies = np.arange(9, len(x), 10)
    x[copies] = x[copies - 1] + draw.normal(0, 0.01, (len(copies), DIM))
    return x.astype(np.float32)


def columns(folder: str) -> pandas.DataFrame:
    return pandas.read_parquet(folder).set_index("key").sort_index()


def test_copies_and_subjects_are_found(features: str, shards: Path) -> None:
    table = columns(eagleray.find_clusters(features, shards, clusters=[3], similar=0.98, keep=0.4, seed=3))
    assert table["cluster"].isna().sum() == table["cluster_size"].isna().sum() == 1
    assert np.isnan(table["cluster"].iloc[BROKEN])
    assert table["balance"].iloc[BROKEN] == 0
    whole = table.drop(index=f"{BROKEN:06d}")
    numbers = whole.index.astype(int).to_numpy()
    assert whole.groupby(subject_of(numbers))["cluster"].nunique().tolist() == [1, 1, 1]
    assert whole["cluster"].nunique() == 3
    copied = whole["duplicate_of"].dropna()
    assert sorted(copied.index.astype(int)) == list(range(9, sum(SUBJECTS), 10))
    assert [int(name.rpartition("/")[2]) for name in copied] == [int(key) - 1 for key in copied.index]
    assert all(Path(shards, name.rpartition("/")[0]).exists() for name in copied), "the tar that it is in"
    assert (whole["balance"] > 0).equals(whole["duplicate_of"].isna())
    staying = whole[whole["duplicate_of"].isna()]
    assert (staying.groupby("cluster")["cluster_size"].agg(["count", "min"]).nunique(axis=1) == 1).all()
    each = staying.groupby(subject_of(staying.index.astype(int).to_numpy()))["balance"].sum()
    assert each.sum() == pytest.approx(0.4 * len(staying), rel=1e-5)
    assert each.iloc[2] == pytest.approx(14), "the rarest is kept whole"
    assert each.iloc[0] > each.iloc[1]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_feature_that_is_no_number_counts_as_none(
    value: float, features: str, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A network overflows on an image, and the clusters of all others stay."""
    overflown = embedded(shards, tmp_path / "overflown", value)
    one, other = (
        columns(eagleray.find_clusters(f, shards, tmp_path / f"of-{Path(f).name}", clusters=[3], similar=0.98))
        for f in (features, overflown)
    )
    pandas.testing.assert_frame_equal(one, other)
    assert capsys.readouterr().out.count("images are near copies; without features: 1") == 2


def test_copies_may_have_to_look_alike(
    features: str, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of every second copy the hash is that of its original, of the others it is far from it."""
    said = refused(capsys, "data", "cluster", features, str(shards), "--bits", "18")
    assert said.endswith("--bits: needs the column phash, which eagleray data measure writes beside the shards")
    index = open_index(str(shards))
    rows = np.array([int(index.key(i)) for i in range(len(index))])
    about = About(MEASURED, {"measures": ["phash"]}, data_digest(index, np.arange(len(index))), len(index))
    table = SampleTable.create(f"{shards}/{MEASURED}/phash", about)
    for part in table.parts:
        mine = rows[table.samples(part)]
        far = np.where(mine % 20 == 9, 0xFFFFF, 0)  # 20 bits
        texts = [f"{0x0123_0000_0000_0000 ^ int(bits):016x}" for bits in far]
        table.write(part, index, {"phash": pa.array(texts, pa.string(), mask=mine == BROKEN)})
    for bits, expected in (
        (0, range(19, sum(SUBJECTS), 20)),
        (18, range(19, sum(SUBJECTS), 20)),
        (20, range(9, sum(SUBJECTS), 10)),
    ):
        out = eagleray.find_clusters(features, shards, tmp_path / str(bits), clusters=[3], similar=0.98, bits=bits)
        assert sorted(columns(out)["duplicate_of"].dropna().index.astype(int)) == list(expected)
    with pytest.raises(UserError, match=r"has a table of bits=18.*; out=FOLDER names another place"):
        eagleray.find_clusters(features, shards, tmp_path / "18", clusters=[3], similar=0.98)
    with pytest.raises(UserError, match="bits=64: expected a whole number from 0 to 63"):
        eagleray.find_clusters(features, shards, bits=64)


def test_a_recipe_chooses_by_the_columns(features: str, shards: Path) -> None:
    eagleray.find_clusters(features, shards, clusters=[12, 3], similar=0.98)
    index = open_index(str(shards))
    source = Source(url=str(shards), where="duplicate_of is null", weight="balance")
    chosen = select(replace(index, sources=[source] * len(index.shards)))
    assert chosen is not None
    assert (chosen.weight > 0).sum() == sum(SUBJECTS) - len(range(9, sum(SUBJECTS), 10)) - 1


def test_ranks_write_what_one_process_writes(
    features: str, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "TOGETHER", 2 * DIM * 20)
    options: dict[str, Any] = {"clusters": [12, 3], "similar": 0.98, "seed": 3}
    alone = columns(eagleray.find_clusters(features, shards, tmp_path / "alone", **options))
    given = sample_table.read_about(str(tmp_path / "alone"))
    assert given
    table = SampleTable.create(str(tmp_path / "shared"), given)
    about = sample_table.read_about(features)
    assert about
    task = Task(SampleTable(features, about), table, str(shards), gpus=False)
    shown = on_ranks(2, work, tmp_path, task, start="fork")
    pandas.testing.assert_frame_equal(columns(table.folder), alone, atol=1e-5)
    for phases in shown:
        assert set(phases) == {"reading", "k-means", "assigning", "sorting by cluster", "near copies"}
        assert all(0 < done <= total for done, total in phases.values())


def test_each_part_is_read_once_for_all_batches(
    features: str, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch holds whole clusters, whose samples are spread over all parts; how large it is changes nothing."""
    options: dict[str, Any] = {"clusters": [12, 3], "similar": 0.98, "seed": 3}
    whole = Path(eagleray.find_clusters(features, shards, tmp_path / "whole", **options))
    read: list[int] = []

    def counted(table: SampleTable, samples: NDArray[np.int64]) -> Any:
        read.append(int(samples[0]))
        return read_features(table, samples)

    monkeypatch.setattr(copies, "TOGETHER", 2 * DIM * 20)
    monkeypatch.setattr(clustering, "find_clusters", remembering(clustering.find_clusters, read))
    monkeypatch.setattr(copies, "read_features", counted)
    again = Path(eagleray.find_clusters(features, shards, tmp_path / "again", **options))
    assert read == list(range(0, sum(SUBJECTS), 64))
    assert all((again / p.name).read_bytes() == p.read_bytes() for p in whole.glob("part-*"))


def remembering(honest: Any, read: list[int]) -> Any:
    """Forget what was read in finding the clusters."""

    def found(*given: Any) -> Any:
        clusters = honest(*given)
        read.clear()
        return clusters

    return found


def test_the_order_of_the_samples_changes_no_more_than_the_names_of_clusters(
    features: str, shards: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"clusters": [12, 3], "similar": 0.9, "seed": 3}
    one = columns(eagleray.find_clusters(features, shards, **options))
    turned = written(tmp_path / "turned", reversed(range(sum(SUBJECTS))))
    two = columns(eagleray.find_clusters(embedded(turned, tmp_path / "turned-features"), turned, **options))
    for level in ("cluster", "cluster_2"):
        pairs = set(zip(one[level].fillna(-1), two[level].fillna(-1), strict=True))
        assert len(pairs) == one[level].nunique() + 1 == two[level].nunique() + 1
    original = [table["duplicate_of"].str.rpartition("/")[2] for table in (one, two)]
    assert original[0].equals(original[1])
    same = ["centre_similarity", "cluster_size", "similarity", "balance"]
    pandas.testing.assert_frame_equal(one[same], two[same], atol=1e-5)


def test_a_stage_that_another_command_has_cleared_is_computed_again(tmp_path: Path) -> None:
    first, second = Stages(str(tmp_path)), Stages(str(tmp_path))
    first.save("nearest-000000", rows=np.arange(3))
    assert second.before == {"nearest-000000"}
    first.clear()  # at the end of the first command
    assert second.load("nearest-000000") is None


def test_what_was_killed_after_any_stage_continues_to_the_same_bytes(
    features: str, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "TOGETHER", 2 * DIM * 60)
    options: dict[str, Any] = {"clusters": [12, 3], "similar": 0.9, "seed": 3}
    saved: list[str] = []
    honest = Stages.save

    def save(self: Stages, name: str, **arrays: Any) -> Any:
        if len(saved) == stop:
            raise KeyboardInterrupt
        saved.append(name)
        return honest(self, name, **arrays)

    monkeypatch.setattr(Stages, "save", save)
    stop = 1000
    whole = Path(eagleray.find_clusters(features, shards, tmp_path / "whole", **options))
    before = {path.name: path.read_bytes() for path in whole.iterdir()}
    assert not [name for name in before if name.startswith("_stage-")], "nothing is left behind"
    stages = list(saved)
    assert len({name.partition("-")[0] for name in stages}) == 3
    assert len(stages) == len(stages[: stages.index("nearest-000000")]) + 4 + sum("copies" in s for s in stages)
    assert sum("copies" in name for name in stages) > 2
    for kill in range(1, len(stages), 2):
        saved.clear()
        stop = kill
        with pytest.raises(KeyboardInterrupt):
            eagleray.find_clusters(features, shards, tmp_path / str(kill), **options)
        assert len(list((tmp_path / str(kill)).glob("_stage-*"))) == len(set(stages[:kill]))
        stop = 1000
        again = Path(eagleray.find_clusters(features, shards, tmp_path / str(kill), **options))
        assert saved == stages, "no stage was computed twice"
        assert {path.name: path.read_bytes() for path in again.iterdir()} == before


@pytest.mark.parametrize("similar", [0.9, 0.8, 0.6])
def test_with_all_clusters_as_neighbours_the_search_is_exact(
    similar: float, features: str, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Borders between clusters, the size of files and of groups of guests do not matter then: no two images that stay
    are near copies, and each copy leads to an image that stays and is larger."""
    monkeypatch.setattr(clustering, "NEIGHBOURS", 12)
    monkeypatch.setattr(copies, "TOGETHER", 2 * DIM * 40)
    monkeypatch.setattr(copies, "GUESTS", 7)
    table = columns(eagleray.find_clusters(features, shards, clusters=[12], similar=similar)).drop(f"{BROKEN:06d}")
    x = np.delete(vectors(), BROKEN, axis=0)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    stays = table["duplicate_of"].isna().to_numpy()
    among = x[stays] @ x[stays].T - 2 * np.eye(stays.sum())
    assert among.max() < similar + 1e-3
    original = table["duplicate_of"].str.rpartition("/")[2].dropna()
    assert (original.index > original).all(), "keys rise as files get smaller"
    assert stays[table.index.get_indexer(original)].all()
    like = (x[table.index.get_indexer(original.index)] * x[table.index.get_indexer(original)]).sum(1)
    assert (like >= similar - 1e-3).mean() > 0.8, "but for copies of what became a copy itself"
    assert ((x @ x[stays].T)[~stays].max(1) >= similar - 1e-3).mean() > 0.8


def test_copies_are_found_across_borders(
    features: str, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one cluster for three images, borders lie between many images and their copies."""
    options: dict[str, Any] = {"clusters": [65], "similar": 0.98, "seed": 1}
    table = columns(eagleray.find_clusters(features, shards, tmp_path / "few", **options))
    planted = set(range(9, sum(SUBJECTS), 10))
    assert set(table["duplicate_of"].dropna().index.astype(int)) == planted
    monkeypatch.setattr(clustering, "NEIGHBOURS", 1)
    alone = columns(eagleray.find_clusters(features, shards, tmp_path / "none", **options))
    assert set(alone["duplicate_of"].dropna().index.astype(int)) <= planted


def test_no_more_than_a_piece_of_the_features_is_in_memory(
    features: str, shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read at once is a part of the table, a piece of the file that k-means reads, or a cluster with GUESTS."""
    monkeypatch.setattr(kmeans, "PIECE", 50)
    monkeypatch.setattr(copies, "GUESTS", 5)
    blocks: list[int] = []
    honest = copies.Likeness

    def likeness(x: Any, *others: Any) -> Any:
        blocks.append(len(x))
        return honest(x, *others)

    def pieces(file: Any, kind: Any, count: int) -> Any:
        found = fromfile(file, kind, count)
        blocks.append(len(found) // DIM)
        return found

    fromfile = np.fromfile
    monkeypatch.setattr(copies, "Likeness", likeness)
    monkeypatch.setattr(np, "fromfile", pieces)
    table = columns(eagleray.find_clusters(features, shards, clusters=[12], similar=0.98))
    assert len(blocks) > 50
    assert max(blocks) <= max(50, table["cluster"].value_counts().max() + 5)


@pytest.mark.slow
def test_ray_workers_write_what_one_process_writes(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(sample_table, "ROWS", 16_384)  # in the workers it is not changed
    features = request.getfixturevalue("features")
    options: dict[str, Any] = {"clusters": [12, 3], "similar": 0.98, "seed": 3}
    alone = columns(eagleray.find_clusters(features, shards, tmp_path / "alone", **options))
    shared = columns(eagleray.find_clusters(features, shards, tmp_path / "shared", workers=2, **options))
    pandas.testing.assert_frame_equal(shared, alone, atol=1e-5)


def work(task: Task) -> dict[str, tuple[int, int]]:
    sample_table.ROWS = 64
    shown: dict[str, tuple[int, int]] = {}
    index = open_index(task.url)
    clustering.work(task, index, devices.CPU, lambda phase, done, total: shown.update({phase: (done, total)}), print)
    assert dist.size() == 2
    return shown


def test_features_that_tell_nothing_apart_are_noticed(
    features: str, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An embedding by a backbone that has learned nothing calls most images copies of each other."""
    eagleray.find_clusters(features, shards, tmp_path / "good", clusters=[3], similar=0.98)
    said = " ".join(capsys.readouterr().out.split())
    assert "19 of 195 images are near copies" in said
    assert "warning" not in said
    eagleray.find_clusters(features, shards, tmp_path / "bad", clusters=[3], similar=0.1)
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"warning: these are 9\d%: the features hardly tell images apart", said)
    assert "--similar above 0.1" in said


def test_clusters_are_compared_in_batches_that_fit() -> None:
    starts = np.array([0, 5, 6, 30, 33])
    assert list(copies.in_batches(starts, 40, 8)) == [(0, 6), (6, 30), (30, 33), (33, 40)]
    assert list(copies.in_batches(starts, 40, 1000)) == [(0, 40)]
    assert list(copies.in_batches(np.array([0]), 40, 8)) == [(0, 40)]


def test_small_batches_find_the_same(
    features: str, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"clusters": [12, 3], "similar": 0.9}
    whole = columns(eagleray.find_clusters(features, shards, tmp_path / "whole", **options))
    monkeypatch.setattr(copies, "TOGETHER", 2 * DIM * 20)
    parts = columns(eagleray.find_clusters(features, shards, tmp_path / "parts", **options))
    pandas.testing.assert_frame_equal(parts, whole, atol=1e-6)


def test_what_was_killed_is_made_again_and_other_numbers_are_refused(features: str, shards: Path) -> None:
    folder = Path(eagleray.find_clusters(features, shards, clusters=[3]))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / "part-000001.parquet").unlink()
    eagleray.find_clusters(features, shards, clusters=[3])
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    with pytest.raises(UserError, match=r"has a table of clusters=\[3\]; out=FOLDER names another place"):
        eagleray.find_clusters(features, shards, clusters=[4])


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--clusters", "3,x"], "error: --clusters 3,x: expected whole numbers, separated by commas"),
        (
            ["--clusters", "3,30"],
            "error: --clusters 3,30: expected falling numbers from at most 195, the samples, to 1",
        ),
        (["--clusters", "300"], "error: --clusters 300: expected falling numbers from at most 195, the samples, to 1"),
        (
            ["--clusters", "195"],
            "features: 194 different features were drawn from 195 samples; expected at least 195, the clusters",
        ),
        (["--similar", "0"], "error: similar=0.0: expected a number above 0, up to 1"),
        (["--keep", "nan"], "error: keep=nan: expected a number above 0, up to 1"),
        (["--gpus"], "--gpus: is for the Ray tasks of --workers N; without them this process uses its own GPU"),
    ],
)
def test_wrong_numbers_are_one_line(
    arguments: list[str], line: str, features: str, shards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, "data", "cluster", features, str(shards), *arguments)
    assert said.endswith(line)


def test_wrong_numbers_of_python_are_named(features: str, shards: Path) -> None:
    for given in "0.9", None, [0.9]:
        with pytest.raises(UserError, match=re.escape(f"similar={given!r}: expected a number above 0, up to 1")):
            eagleray.find_clusters(features, shards, similar=given)  # type: ignore[arg-type]


def test_features_of_something_else_are_refused(
    features: str, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, "data", "cluster", str(shards), str(shards))
    assert said.endswith("shards: no features; expected a folder that eagleray embed has written")
    write_shards([Sample("a", "jpg", b"a", 0)], str(tmp_path / "other"))
    said = refused(capsys, "data", "cluster", features, str(tmp_path / "other"))
    assert said.endswith("features: features of other images (195, here 1)")
    Path(features, "part-000001.parquet").unlink()
    said = refused(capsys, "data", "cluster", features, str(shards))
    assert said.endswith("features: 1 of 4 parts are missing; eagleray embed continues")


def test_levels_without_a_choice() -> None:
    assert clustering.default_levels(500) == [1]
    assert clustering.default_levels(60_000) == [60]
    assert clustering.default_levels(14_200_000) == [14_200, 1_420, 142, 14]
