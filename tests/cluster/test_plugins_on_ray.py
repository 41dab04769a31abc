"""Plug-ins travel: to the workers of a run, to tasks, to the trials of a sweep, and in the package of a job."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from helpers.pictures import jpeg
from helpers.plugins import write_plugin, write_recipe
from helpers.runs import arguments, start
from typer.testing import CliRunner

from eagleray.base.files import read_lines
from eagleray.cli import main
from eagleray.cluster import job_package
from eagleray.config import plugins
from eagleray.runs import recipe as recipes

pytestmark = pytest.mark.filterwarnings("ignore:Overwriting vit_of_a_plugin")


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    yield
    plugins.unload()


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A recipe with a plug-in beside it, which is not the working folder of any process."""
    write_plugin(tmp_path / "recipes")
    return write_recipe(tmp_path / "recipes")


def test_a_job_takes_the_plugin_along(mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = job_package.pack(str(mine), [f"data.train={tmp_path}/shards", f"out={tmp_path}/out"], None)
    (sent := tmp_path / "sent").mkdir()
    package.write(sent)
    assert (sent / "plugins" / "my_method.py").read_bytes() == (mine.parent / "my_method.py").read_bytes()
    plugins.unload()
    monkeypatch.chdir(sent)  # as the job's command is run on the head
    assert recipes.digest(recipes.load("recipe.yaml")) == recipes.digest(package.recipe)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_method_trains_on_two_ray_workers(mine: Path, shards: Path, tmp_path: Path):
    out = tmp_path / "out"
    more = ["workers=2", "max_steps=4", "evaluate.probe_epochs=0"]
    process = start(arguments(mine, shards, out, *more))
    text = process.communicate(timeout=350)[0]
    assert process.returncode == 0, text
    assert json.loads((out / "summary.json").read_text())["steps"] == 4
    assert [e["event"] for e in read_lines(out / "diary.jsonl")][-1] == "end"
    assert (out / "plugins" / "my_method.py").exists()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_plugin_that_fails_on_a_ray_worker_is_one_line(mine: Path, shards: Path, tmp_path: Path):
    path = mine.parent / "my_method.py"
    path.write_text(path.read_text().replace("out = crop.clone()", "raise KeyError('colour')"))
    process = start(arguments(mine, shards, tmp_path / "out", "workers=2", "max_steps=4"))
    text = process.communicate(timeout=350)[0]
    assert process.returncode == 2, text
    assert text.splitlines()[-1].startswith("error: view operation 'stripes' failed: KeyError: 'colour'")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_source_is_read_by_ray_tasks(mine: Path, tmp_path: Path):
    for i, name in enumerate(("a1.bin", "a2.bin", "b1.bin")):
        (path := tmp_path / "in" / name).parent.mkdir(exist_ok=True)
        path.write_bytes(jpeg(i)[::-1])
    options = ["--plugin", str(mine.parent / "my_method.py"), "--workers", "2"]
    command = ["prepare", "drawers", str(tmp_path / "in"), str(tmp_path / "shards"), *options]
    result = CliRunner().invoke(main.app, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "shards" / "dataset.json").read_text())["images"] == 3


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_method_trains_in_the_trials_of_a_sweep(mine: Path, shards: Path, tmp_path: Path):
    sweep = {"recipe": mine.name, "space": {"method.dim": {"choice": [8, 12]}}, "trials": 2, "scheduler": "none"}
    sweep["fixed"] = {"optim.epochs": 1, "max_steps": 4, "evaluate.probe_epochs": 0}
    (path := mine.parent / "sweep.yaml").write_text(yaml.safe_dump(sweep | {"objective": {"key": "knn/top1"}}))
    data = [f"data.train={shards / 'train'}", f"data.test={shards / 'test'}", f"out={tmp_path / 'out'}"]
    result = CliRunner().invoke(main.app, ["tune", str(path), *data], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert [row["state"] for row in read_lines(tmp_path / "out" / "trials.jsonl")] == ["finished", "finished"]
    for folder in (tmp_path / "out", tmp_path / "out" / "trials" / "000"):
        assert (folder / "plugins" / "my_method.py").exists(), folder
    assert recipes.load(str(tmp_path / "out" / "best.yaml")).plugins
