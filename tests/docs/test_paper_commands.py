"""Commands of pages that name models of papers, large sets or a store: they run in the order of their page, with small
models under the papers' names, drawn images and a real S3 server."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import reader_home
from helpers.commands import run
from helpers.page_share import FOUND, ON_SMALL, on_small
from helpers.runs import arguments
from helpers.s3.server import store_of

from eagleray.config import bundled
from eagleray.engine.export import to_timm
from eagleray.runs import pretrain

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, quick_runs: None) -> Iterator[Path]:
    """A folder with all that pages name, also finished runs of MoCo v3 and DINO, and a store."""
    folder, place = tmp_path_factory.mktemp("made"), tmp_path_factory.mktemp("other")
    reader_home.lay_out(folder)
    reader_home.public_sets(folder)
    for method in ("mocov3", "dino"):
        (place / f"{method}.yaml").write_text(reader_home.small(method))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain, "to_timm", to_timm)  # the only run whose export is read
        run("pretrain", *arguments(place / "mocov3.yaml", folder / "labelled", place / "mine"))
    run("pretrain", *arguments(place / "dino.yaml", folder / "labelled", folder / "runs" / reader_home.DINO_RUN))
    for name in reader_home.RUNS:
        shutil.copytree(place / "mine", folder / "runs" / name)
    with store_of(place / "store", *reader_home.BUCKETS):
        yield folder


@pytest.fixture
def _home(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of a page run in a folder of their own, and find the store as it is for each page."""
    shutil.copytree(made, home := tmp_path / "home")
    reader_home.fill_store(home)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(bundled, "tree", reader_home.shipped)
    monkeypatch.chdir(home)


@pytest.mark.usefixtures("_home")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", ON_SMALL)
def test_commands_on_models_of_papers_run_on_small_ones(page: str):
    found = [c for c in FOUND if c.page == page and on_small(c)]
    assert found
    for command in found:
        words = reader_home.adapted(command)
        for place in reader_home.written_by(words):
            reader_home.clear(place)
        run(*words)
