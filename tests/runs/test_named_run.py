"""A run that is named in place of a recipe: which it is, what it goes on with, and what is refused."""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.bucket import CountingBucket
from helpers.plugins import write_plugin, write_recipe
from typer.testing import CliRunner

from eagleray import config
from eagleray.base.errors import UserError
from eagleray.cli.main import app
from eagleray.cluster import job_package
from eagleray.config import plugins
from eagleray.runs import layout
from eagleray.runs import recipe as recipes
from eagleray.runs.bucket_files import BucketRun
from eagleray.runs.command import write_plugins
from eagleray.runs.named_run import check_goes_on, named_run
from eagleray.runs.run_store import run_store
from eagleray.storage import store

pytestmark = pytest.mark.filterwarnings("ignore:Overwriting vit_of_a_plugin")
KEYS = ["data.train=s3://data/train", "seed=7", "workers=4", "max_steps=9"]


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CountingBucket]:
    """A bucket, a working folder and a cache of the test's own, and no plug-in that stays."""
    (folder := tmp_path / "here").mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    bucket = CountingBucket(tmp_path / "bucket")
    monkeypatch.setitem(store.STORES, "s3", bucket)
    yield bucket
    plugins.unload()


def begun(recipe: Path, out: str) -> recipes.Recipe:
    """A run that has begun as a command begins it."""
    resolved = recipes.load(str(recipe), [*KEYS, f"out={out}"])
    run_store(out).put(layout.RECIPE, config.dump(resolved))
    run_store(out).put(layout.ENVIRONMENT, "{}")
    write_plugins(out, resolved.plugins)
    return resolved


@pytest.mark.parametrize("name", ["s3://runs/first", "s3://runs/first/", "s3://runs/first/recipe.yaml"])
def test_a_run_in_a_store_goes_on_with_its_plugins_elsewhere(name: str, tmp_path: Path):
    write_plugin(tmp_path / "recipes")
    resolved = begun(write_recipe(tmp_path / "recipes"), "s3://runs/first")
    assert resolved.plugins
    plugins.unload()
    for path in (tmp_path / "recipes").glob("*.py"):
        path.unlink()
    assert recipes.load(name) == resolved
    package = job_package.pack(name, [], 2)
    assert (package.out, package.digest) == ("s3://runs/first", recipes.digest(resolved))
    assert package.recipe is not None
    assert package.recipe.workers == 2
    assert package.plugins[plugins.FOLDER]


def test_a_run_in_a_store_goes_on_with_the_plugins_of_an_installed_package(tmp_path: Path):
    write_plugin(tmp_path / "site-packages")
    sys.path.append(str(tmp_path / "site-packages"))
    resolved = begun(write_recipe(tmp_path / "recipes", "[my_method]"), "s3://runs/first")
    assert not (tmp_path / "bucket" / "runs" / "first" / plugins.FOLDER).exists()
    plugins.unload()
    assert recipes.load("s3://runs/first") == resolved


def test_a_folder_goes_on_where_it_lies_now(small: Path, tmp_path: Path):
    resolved = begun(small, str(tmp_path / "first"))
    (tmp_path / "first").rename(tmp_path / "moved")
    assert recipes.load("../moved").out == str(tmp_path / "moved")
    assert recipes.load("../moved", ["out=s3://runs/other"]).out == "s3://runs/other"
    assert recipes.identity(recipes.load("../moved/")) == recipes.identity(resolved)


@pytest.mark.parametrize("out", ["s3://runs/first", "first"])
def test_what_cannot_go_on_is_one_line(out: str, small: Path):
    with pytest.raises(UserError, match=f"{out}: no recipe"):
        recipes.load(out)
    run = run_store(store.absolute(out))
    run.put(layout.RECIPE, small.read_text())
    with pytest.raises(UserError, match=f"{out}: no run has begun there"):
        recipes.load(out)
    begun(small, store.absolute(out))
    check_goes_on(out, [])
    run.put(layout.SUMMARY, json.dumps({"steps": 9}))
    with pytest.raises(UserError, match=f"{out}: the run has finished, with 9 steps; a larger max_steps continues it"):
        check_goes_on(out, [])
    with pytest.raises(UserError, match="the run has finished"):
        check_goes_on(out, ["workers=2"])
    check_goes_on(out, ["workers=2", "out=other"])
    check_goes_on(out, ["max_steps=20"])
    run.append(layout.METRICS, '{"step": 12}\n')
    check_goes_on(out, [])  # it went on after its end
    run.put(layout.SUMMARY, json.dumps({"steps": 12, "ended_early": 1}))
    with pytest.raises(UserError, match=f"{out}: the run ended early, after 12 steps; expected another out$"):
        check_goes_on(out, [])


def test_a_command_asks_once_for_the_run_that_it_names(small: Path, monkeypatch: pytest.MonkeyPatch):
    begun(small, "s3://runs/first")
    asked, get = list[str](), BucketRun.get

    def stop() -> str:
        raise UserError("begins")

    monkeypatch.setattr(BucketRun, "get", lambda self, name: asked.append(name) or get(self, name))
    monkeypatch.setattr("eagleray.api.pretrain.new_command", stop)
    for words in ["pretrain", "s3://runs/first"], ["finetune", "timm:resnet18", "s3://runs/first"]:
        asked.clear()
        ended = CliRunner().invoke(app, [*words, "workers=0"])
        assert str(ended.exception) == "begins", ended.output
        assert Counter(asked) == {layout.RECIPE: 1, layout.ENVIRONMENT: 1}
    assert named_run("s3://runs/other") is None
    begun(small, "s3://runs/other")
    assert named_run("s3://runs/other"), "what a program asks later is looked up anew"
