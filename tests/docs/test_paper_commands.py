"""Commands of pages that name models of papers, large sets or a store: they run in the order of their page, with small
models under the papers' names, drawn images and a real S3 server."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import reader_home
from helpers.clouds import Cloud
from helpers.commands import run
from helpers.page_share import FOUND, SMALL_PAGES, on_small
from helpers.runs import arguments
from helpers.s3.server import store_of
from huggingface_hub import constants

from eagleray.config import bundled
from eagleray.runs import pretrain

pytestmark = pytest.mark.slow
WRITE_EXPORT = pretrain.write_export


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, quick_runs: None) -> Iterator[Path]:
    """A folder with all that pages name, also finished runs of MoCo v3, DINO and DINOv2, and a store."""
    folder, place = tmp_path_factory.mktemp("made"), tmp_path_factory.mktemp("other")
    reader_home.lay_out(folder)
    reader_home.public_sets(folder)
    for method in ("mocov3", *reader_home.OTHER_RUNS):
        (place / f"{method}.yaml").write_text(reader_home.small(method))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain, "write_export", WRITE_EXPORT)  # the only run whose export is read
        run("pretrain", *arguments(place / "mocov3.yaml", folder / "labelled", place / "mine"))
    for method, name in reader_home.OTHER_RUNS.items():
        run("pretrain", *arguments(place / f"{method}.yaml", folder / "labelled", folder / "runs" / name))
    for name in reader_home.RUNS:
        shutil.copytree(place / "mine", folder / "runs" / name)
    reader_home.public_weights(folder / "hub", folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundled, "tree", reader_home.shipped)
        data = [f"data.{split}={folder / 'labelled' / split}" for split in ("train", "test")]
        run(
            "tune",
            "cifar10_small",
            *data,
            "sweep.trials=1",
            "monitor.every=4",
            "monitor.bank=512",
            f"out={folder / 'sweeps' / 'mine'}",
        )
    with store_of(place / "store", *reader_home.BUCKETS):
        yield folder


@pytest.fixture
def web(made: Path) -> Iterator[str]:
    """A web server that has the training shards; the pages call it https://host."""
    with Cloud() as server:
        server.serve(made / "labelled" / "train")
        yield f"http://127.0.0.1:{server.port}/web"


@pytest.fixture
def _home(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of a page run in a folder of their own, and find the store as it is for each page."""
    shutil.copytree(made, home := tmp_path / "home")
    reader_home.fill_store(home)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.chdir(home)


@pytest.mark.usefixtures("_home")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", SMALL_PAGES)
def test_commands_on_models_of_papers_run_on_small_ones(page: str, web: str, monkeypatch: pytest.MonkeyPatch):
    found = [c for c in FOUND if c.page == page and on_small(c)]
    assert found
    for command in found:
        monkeypatch.setattr(bundled, "tree", reader_home.recipes(command))
        words = [word.replace("https://host", web) for word in reader_home.adapted(command)]
        for place in reader_home.written_by(words):
            reader_home.clear(place)
        run(*words)
