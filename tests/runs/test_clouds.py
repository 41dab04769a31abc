"""Runs from and in every store: the same as from and in a folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.clouds import Cloud, running
from helpers.pictures import jpeg
from helpers.recipes import small_recipe
from helpers.runs import FAST, assert_same, weights

from eagleray.api.pretrain import pretrain
from eagleray.base.errors import UserError
from eagleray.data.index_file import NAME
from eagleray.datasets.shards import Sample, write_shards
from eagleray.engine import checkpoint
from eagleray.runs import recipe as recipes
from eagleray.runs.sources import resolve_paths
from eagleray.storage import store

pytestmark = pytest.mark.usefixtures("quick_runs")


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with running() as server:
        server.files["data"] = {}
        yield server


def run(recipe: Path, shards: Path, out: str | Path, *keys: str, train: str = "") -> None:
    data = [f"data.train={train or shards / 'train'}", f"data.test={shards / 'test'}", f"out={out}"]
    pretrain(str(recipe), [*data, *FAST, *keys])


def test_a_run_from_any_store_is_that_from_a_folder(cloud: Cloud, small: Path, shards: Path, tmp_path: Path) -> None:
    """With loader processes, which have connections of their own."""
    tars = sorted(p.name for p in (shards / "train").glob("*.tar"))
    for name in tars:
        for bucket in ("data", "web"):
            cloud.write(bucket, f"train/{name}", (shards / "train" / name).read_bytes())
    run(small, shards, tmp_path / "local", "max_steps=3")
    names = f"{{{','.join(tars)}}}"
    for scheme, data in {
        "gs": "gs://data/train",
        "az": f"az://data/train/{names}",
        "http": f"http://127.0.0.1:{cloud.port}/moved/train/{names}",
    }.items():
        cloud.files["data"].pop(f"train/{NAME}", None)
        run(small, shards, tmp_path / scheme, "max_steps=3", "data.workers=2", train=data)
        assert_same(weights(tmp_path / scheme), weights(tmp_path / "local"))
        assert (f"train/{NAME}" in cloud.files["data"]) == (scheme != "http")
    assert f"train/{NAME}" not in cloud.files["web"]  # which takes no files: the index is in the run's folder


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["gs", "az"])
def test_a_run_is_kept_in_a_store_and_continued_from_it(
    cloud: Cloud, small: Path, shards: Path, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = f"{scheme}://data/runs/first"
    run(small, shards, tmp_path / "local", "max_steps=2")
    run(small, shards, out, "max_steps=1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other machine"))
    run(small, shards, out, "max_steps=2")
    state = checkpoint.newest(f"{out}/checkpoints", scratch=tmp_path / "scratch")
    assert state is not None
    assert_same(state["method"], weights(tmp_path / "local"))


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("https://host/runs/first", "out=https://host/runs/first: a web server can only be read; expected a folder"),
        ("ftp://host/runs/first", "out=ftp://host/runs/first: unknown scheme 'ftp'; known are plain paths, file://"),
    ],
)
def test_a_run_is_not_kept_where_nothing_can_be_written(out: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(small_recipe("mocov3"))
    recipe = recipes.load(str(tmp_path / "small.yaml"), ["data.train=x", f"out={out}"])
    with pytest.raises(UserError) as caught:
        resolve_paths(recipe)
    assert str(caught.value).startswith(message)


def test_shards_are_prepared_into_a_store(cloud: Cloud, tmp_path: Path) -> None:
    samples = [Sample(f"s{i:03d}", "jpg", jpeg(i), i % 5) for i in range(24)]
    places = [str(tmp_path / "local"), "gs://data/new", "az://data/other"]
    for place in places:
        assert write_shards(samples, place, size=8_000)[1] == 24
    contents = [[bytes(store.store(b.url).get(b.url)) for b in store.list_shards(place)] for place in places]
    assert len(contents[0]) > 2
    assert contents[0] == contents[1] == contents[2]
    for place in places[1:]:
        with pytest.raises(UserError, match="holds shards already"):
            write_shards(samples, place)
