"""Commands of pages that name models of papers, large sets or a store: they run in the order of their page, with small
models under the papers' names, drawn images and a real S3 server."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import reader_home
from helpers.page_share import FOUND, ON_SMALL, on_small
from helpers.recipes import SMALL
from helpers.runs import arguments
from helpers.s3.server import store_of

from eagleray.cli import main
from eagleray.config import bundled

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(shards: Path, tmp_path_factory: pytest.TempPathFactory, quick_runs: None) -> Iterator[Path]:
    """A finished run in every place that a page names."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "small.yaml").write_text(SMALL)
    with store_of(folder / "store", "bucket", "b", "c", "mirror"):
        run("pretrain", *arguments(folder / "small.yaml", shards, folder / "runs" / "mine", "workers=0"))
        yield folder / "runs" / "mine"


@pytest.fixture
def home(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the commands of a page run in."""
    reader_home.lay_out(tmp_path)
    reader_home.public_sets(tmp_path)
    reader_home.fill_store(tmp_path)
    for name in ("mine", *reader_home.RUNS):
        shutil.copytree(runs, tmp_path / "runs" / name)
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
        if words[0] == "prepare":  # which writes into no folder that holds something else
            shutil.rmtree(home / words[3], ignore_errors=True)
        run(*words)
