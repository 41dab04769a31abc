"""`--plugin` loads a file or a module in every command that takes a recipe, a source or a protocol."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from helpers.commands import refused
from helpers.plugins import write_plugin, write_recipe
from typer.testing import CliRunner

from eagleray import config
from eagleray.cli import main
from eagleray.config import plugins
from eagleray.sweeps import sweep

pytestmark = pytest.mark.filterwarnings("ignore:Overwriting vit_of_a_plugin")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working folder, with the plug-in in it; each test leaves no plug-in behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    write_plugin(tmp_path)
    yield tmp_path
    plugins.unload()


def eagleray(*args: str) -> str:
    result = CliRunner().invoke(main.app, args, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_it_adds_to_the_plugins_of_the_recipe(folder: Path):
    (folder / "other.py").write_text("VALUE = 1\n")
    names = ("--plugin", "my_method.py", "--plugin", "other.py")
    tree = yaml.safe_load(eagleray("show", str(write_recipe(folder)), *names))
    assert [entry["name"] for entry in tree["plugins"]] == ["my_method.py", "other.py"]
    plugins.unload()
    bare = write_recipe(folder / "bare", plugins="")
    assert yaml.safe_load(eagleray("show", str(bare), "--plugin", "my_method.py"))["method"]["dim"] == 12


def test_lists_show_what_plugins_add():
    assert "cosine_pairs" in eagleray("list", "methods", "--plugin", "my_method.py")
    assert "drawers" in eagleray("list", "datasets", "--plugin", "my_method.py")
    assert "mean norm of the pooled features" in eagleray("list", "protocols", "--plugin", "my_method.py")


def test_a_sweep_has_the_plugins_of_its_recipes_and_its_own(folder: Path):
    write_recipe(folder)
    (folder / "other.py").write_text("VALUE = 1\n")
    (folder / "sweep.yaml").write_text("{recipe: mine.yaml, space: {method.dim: {choice: [8, 12]}}, trials: 2}")
    [branch] = sweep.load("sweep.yaml", ["data.train=none"], ["other.py"]).alternatives.values()
    assert isinstance(branch.recipe, dict)
    assert [entry["name"] for entry in branch.recipe["plugins"]] == ["my_method.py", "other.py"]


def test_a_sweeps_own_file_finds_its_plugins_beside_it_and_takes_more(folder: Path):
    write_recipe(folder)
    (folder / "sweep.yaml").write_text("{recipe: mine.yaml, space: {method.dim: {choice: [8, 12]}}, trials: 2}")
    first = sweep.load("sweep.yaml", ["data.train=none"])
    (folder / "out" / "plugins").mkdir(parents=True)
    (folder / "out" / "sweep.yaml").write_text(config.dump(first))
    (folder / "my_method.py").rename(folder / "out" / "plugins" / "my_method.py")
    (folder / "other.py").write_text("VALUE = 1\n")
    plugins.unload()
    assert sweep.load("out/sweep.yaml").alternatives == first.alternatives
    [branch] = sweep.load("out/sweep.yaml", plugins=["other.py"]).alternatives.values()
    assert isinstance(branch.recipe, dict)
    assert [entry["name"] for entry in branch.recipe["plugins"]] == ["my_method.py", "other.py"]


@pytest.mark.parametrize(
    "command",
    [
        ("pretrain", "mine.yaml"),
        ("finetune", "timm:resnet50", "mine.yaml"),
        ("show", "mine.yaml"),
        ("evaluate", "untrained:resnet50"),
        ("prepare", "drawers", "in", "out"),
        ("list", "methods"),
        ("list", "recipes"),
        ("export", "runs/none"),
    ],
    ids=lambda command: command[0],
)
def test_a_plugin_that_is_not_there(command: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str]):
    write_recipe(folder)
    assert "plugins: none.py: no such file in" in refused(capsys, *command, "--plugin", "none.py")


@pytest.fixture
def strangers(folder: Path) -> Path:
    """The folder of a run whose plug-in writes a file when it is imported."""
    run = folder / "run"
    write_plugin(run / "plugins", more=f"\nopen({str(folder / 'ran')!r}, 'w').close()\n")
    tree = yaml.safe_load(write_recipe(run).read_text())
    tree["data"]["train"] = str(folder / "none")
    copy = plugins.PluginCopy(run, {"my_method.py": (run / "plugins" / "my_method.py").read_bytes()})
    tree["plugins"] = [{"name": "my_method.py", "sha256": copy.sha256}]
    (run / "recipe.yaml").write_text(yaml.safe_dump(tree))
    return run


def test_a_run_loads_no_plugin_that_is_not_named(strangers: Path, folder: Path, capsys: pytest.CaptureFixture[str]):
    command = ("data", "which", "run", "--key", "k")
    assert "my_method.py is not loaded" in refused(capsys, *command)
    other = refused(capsys, *command, "--plugin", "my_method.py")  # of the working folder
    assert "its source differs" in other
    assert not (folder / "ran").exists()
    plugins.unload()
    line = refused(capsys, *command, "--plugin", "run/plugins/my_method.py")
    assert "none: cannot be read" in line  # the data
    assert (folder / "ran").exists()


@pytest.mark.parametrize("listed", ["[my_method.py]", "[plugins/my_method.py]", ""])
def test_a_recipe_is_shown_without_running_its_plugin(listed: str, strangers: Path, folder: Path):
    recipe = strangers / "recipe.yaml"
    if listed:
        recipe.write_text(write_recipe(strangers / "as given", plugins=listed).read_text())
    text = eagleray("show", str(recipe), "optim.batch=8")
    assert text.startswith("# without defaults, as the plug-in ")
    assert yaml.safe_load(text)["method"] == {"name": "cosine_pairs", "dim": 12}
    assert yaml.safe_load(text)["optim"]["batch"] == 8
    assert not (folder / "ran").exists()
