"""Commands that need no cluster and no model of a paper run as they are written, on drawn pictures and with a small run
in each place that a page names."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.commands import run
from helpers.page_share import FOUND, here
from helpers.pages import Command
from helpers.pictures import jpeg
from helpers.recipes import SMALL
from helpers.runs import arguments


@pytest.fixture(scope="module")
def home(shards: Path, tmp_path_factory: pytest.TempPathFactory, quick_runs: None) -> Iterator[Path]:
    """A folder as a reader has it: photos/, shards/ and a finished run. The commands run in it."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "photos").mkdir()
    for i in range(280):  # `init` asks for 256
        (folder / "photos" / f"{i}.jpg").write_bytes(jpeg(i))
    shutil.copytree(shards / "train", folder / "shards")
    (folder / "small.yaml").write_text(SMALL)
    run("pretrain", *arguments(folder / "small.yaml", shards, folder / "runs" / "mine"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("command", [c for c in FOUND if here(c)], ids=lambda c: f"{c.page}: {c.text[:60]}")
def test_commands_that_need_no_cluster_run_as_they_are_written(command: Command, home: Path):
    for made in (home / "my_recipe.yaml", home / "mine.yaml"):  # `init` replaces no file
        made.unlink(missing_ok=True)
    if "shard" in command.words()[:1]:
        shutil.rmtree(home / "shards")
    run(*command.words())
