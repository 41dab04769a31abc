"""Commands of pages that name models of papers, large sets or a store: they run in the order of their page, with small
models under the papers' names, drawn images and a real S3 server."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import reader_home
from helpers.page_share import FOUND, ON_SMALL, on_small
from helpers.runs import arguments
from helpers.s3.server import store_of

from eagleray.cli import main
from eagleray.config import bundled
from eagleray.engine.export import to_timm
from eagleray.runs import pretrain

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, quick_runs: None) -> Iterator[Path]:
    """A folder with a finished run of MoCo v3 and one of DINO."""
    folder = tmp_path_factory.mktemp("runs")
    reader_home.labelled(folder / "labelled")
    for method in ("mocov3", "dino"):
        (folder / f"{method}.yaml").write_text(reader_home.small(method))
    with store_of(folder / "store", "bucket", "other", "mirror"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pretrain, "to_timm", to_timm)  # the only run whose export is read
            run("pretrain", *arguments(folder / "mocov3.yaml", folder / "labelled", folder / "mine"))
        run("pretrain", *arguments(folder / "dino.yaml", folder / "labelled", folder / reader_home.DINO_RUN))
        yield folder


@pytest.fixture
def home(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the commands of a page run in."""
    reader_home.lay_out(tmp_path)
    reader_home.public_sets(tmp_path)
    reader_home.fill_store(tmp_path)
    shutil.copytree(runs / reader_home.DINO_RUN, tmp_path / "runs" / reader_home.DINO_RUN)
    for name in reader_home.RUNS:
        shutil.copytree(runs / "mine", tmp_path / "runs" / name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(bundled, "tree", reader_home.shipped)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*words: str) -> None:
    """Run a command in this process. Fails unless its exit status is 0."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["eagleray", *words])
        with pytest.raises(SystemExit) as end:
            main.main()
    assert not end.value.code, f"eagleray {' '.join(words)}: status {end.value.code}"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", ON_SMALL)
def test_commands_on_models_of_papers_run_on_small_ones(page: str, home: Path):
    found = [c for c in FOUND if c.page == page and on_small(c)]
    assert found
    for command in found:
        words = reader_home.adapted(command)
        for place in reader_home.written_by(words):
            reader_home.clear(place)
        run(*words)
