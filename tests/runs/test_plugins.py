"""A plug-in of every kind in a run, what makes it part of the run, and how it is refused."""

import hashlib
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from helpers.commands import refused
from helpers.layouts import run_prepare
from helpers.pictures import jpeg
from helpers.plugins import write_plugin, write_recipe
from helpers.runs import arguments, assert_same, weights
from typer.testing import CliRunner

from eagleray.base.errors import PluginError, UserError
from eagleray.base.files import read_lines
from eagleray.cli import main
from eagleray.config import plugins
from eagleray.data.index import open_index
from eagleray.data.loader import Loader
from eagleray.data.reader import Stream
from eagleray.evaluation.evaluate import Request, evaluate
from eagleray.runs import recipe as recipes
from eagleray.runs.agreement import Agreement, Decision
from eagleray.runs.restore import restore
from eagleray.views.operations import operate
from eagleray.views.sampling import Views

pytestmark = [
    pytest.mark.filterwarnings("ignore:Overwriting vit_of_a_plugin"),
    pytest.mark.usefixtures("untracked_runs"),
]
SHORT = ["max_steps=4", "evaluate.probe_epochs=0"]


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test has a working folder of its own, and leaves no plug-in behind."""
    (folder := tmp_path / "here").mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    plugins.unload()


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A recipe with a plug-in beside it."""
    write_plugin(tmp_path / "recipes")
    return write_recipe(tmp_path / "recipes")


def pretrain(*args: str) -> str:
    """What the command prints."""
    plugins.unload()  # as in a new process
    result = CliRunner().invoke(main.app, ["pretrain", *args], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def finished(untracked_runs: None, shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run of the plug-in's method, in a folder beside that of its recipe."""
    folder = tmp_path_factory.mktemp("finished")
    write_plugin(folder / "recipes")
    recipe, more = write_recipe(folder / "recipes"), [*SHORT, "evaluate.every=1", "checkpoint.steps=2"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", list(sys.path))
        pretrain(*arguments(recipe, shards, folder / "out", *more))
        plugins.unload()
    return folder / "out"


@pytest.fixture
def run(finished: Path, mine: Path, tmp_path: Path) -> Path:
    """A copy of it, for a test to continue, in a process that has loaded its plug-in."""
    plugins.load(str(mine.parent / "my_method.py"))
    shutil.copytree(finished, tmp_path / "out")
    return tmp_path / "out"


def test_a_method_trains_is_evaluated_and_is_kept_with_the_run(run: Path, mine: Path):
    assert "knn/top1" in json.loads((run / "summary.json").read_text())
    assert (run / "plugins" / "my_method.py").read_bytes() == (mine.parent / "my_method.py").read_bytes()
    [entry] = yaml.safe_load((run / "recipe.yaml").read_text())["plugins"]
    assert entry["name"] == "my_method.py"
    assert len(entry["sha256"]) == 64
    assert (run / "export" / "backbone.safetensors").exists()


def test_callbacks_see_every_event_in_order(run: Path, mine: Path, shards: Path, tmp_path: Path):
    def events(out: Path) -> list[tuple[str, int]]:
        return [(e["event"], e.get("step", e.get("steps"))) for e in read_lines(out / "diary.jsonl")]

    seen = events(run)
    assert seen[0] == ("start", 0)
    assert [step for event, step in seen if event == "step"] == [1, 2, 3, 4]
    assert [step for event, step in seen if event == "log"] == [1, 2, 3, 4]
    assert ("checkpoint", 4) in seen
    assert [event for event, _ in seen[-2:]] == ["evaluation", "end"]
    pretrain(*arguments(mine, shards, run, *SHORT, "max_steps=6"))
    assert events(run)[len(seen)] == ("start", 4)


@pytest.mark.parametrize("decision", [False, True])
def test_callbacks_of_all_ranks_see_the_checkpoints_of_rank_0(decision: bool):
    """Rank 1's clock says something else, and does not know whether rank 0 still writes: in a callback that gathers
    something one of them would wait for the other."""
    world = SimpleNamespace(rank=1, spot=False, agree=lambda *own: [*own[:-1], own[-1] + decision])
    folder = SimpleNamespace(stopping=lambda: False, saving=lambda: False)
    cadence = SimpleNamespace(saves=lambda step: not decision, is_milestone=lambda step: False)
    ranks: Any = (world, folder, None, cadence)
    assert Agreement(*ranks).decide(4, [], stop=False) == Decision(goes_on=True, saves=decision)


@pytest.mark.usefixtures("new_process")
def test_a_backbone_that_is_registered_with_timm(shards: Path, tmp_path: Path):
    write_plugin(Path())
    pretrain(*arguments(write_recipe(Path(), backbone="vit_of_a_plugin"), shards, tmp_path / "out", *SHORT))
    assert restore(str(tmp_path / "out")).method.export().dim == 24
    listed = plugins.plugin_of("vit_of_a_plugin", "backbone")
    assert listed
    assert listed.name == "my_method.py"


def stream_of(shards: Path, tmp_path: Path, mine: Path) -> Stream:
    recipe = recipes.load(str(mine))
    views = Views.of([replace(v, operations=("stripes", "stripes")) for v in recipe.views])
    return Stream(open_index(str(shards / "train"), tmp_path), views, recipe.seed, recipe.data.lanes, 32)


def pixels(stream: Stream, *, start: int, steps: int, workers: int = 0) -> list[str]:
    loader = Loader(stream, rank=0, ranks=1, workers=workers, device=torch.device("cpu"))
    batches = (batch for batch, _ in loader.batches(start, start + steps))
    return [hashlib.sha256(b"".join(v.numpy().tobytes() for v in batch.views)).hexdigest() for batch in batches]


def test_an_operation_gives_the_same_crops_whatever_reads_them(shards: Path, tmp_path: Path, mine: Path):
    """For any number of loader processes and after a resume, over the end of an epoch."""
    stream = stream_of(shards, tmp_path, mine)
    alone = pixels(stream, start=8, steps=4)
    assert len(set(alone)) == 4
    assert pixels(stream, start=8, steps=4, workers=1) == alone
    assert pixels(stream, start=8, steps=4, workers=2) == alone
    assert pixels(stream, start=10, steps=2) == alone[2:]
    plain = replace(stream, views=Views.of([replace(v, operations=()) for v in recipes.load(str(mine)).views]))
    assert pixels(plain, start=8, steps=4) != alone


def test_a_source_is_prepared(tmp_path: Path):
    write_plugin(Path())
    plugins.load("my_method.py")
    for i, name in enumerate(("a1.bin", "a2.bin", "b1.bin")):
        (path := tmp_path / "in" / name).parent.mkdir(exist_ok=True)
        path.write_bytes(jpeg(i)[::-1])
    card = run_prepare("drawers", tmp_path / "in", tmp_path / "shards")
    assert card["images"] == 3
    assert card["licence"] == "CC0 1.0"
    index = open_index(str(tmp_path / "shards"), tmp_path)
    assert sorted(index.label.tolist()) == [0, 0, 1]


def test_a_protocol_evaluates_a_run(run: Path, shards: Path):
    data = {"train": str(shards / "train"), "test": str(shards / "test")}
    given = Request(str(run), ["norms", "knn"], **data, settings={"scale": "2.0"})  # type: ignore[arg-type]
    report = evaluate(given, note=lambda line: None)
    assert not report.refused
    numbers = {name: value for r in report.results for name, value in r.numbers.items()}
    assert numbers["norms/mean"] > 0
    assert "knn/top1" in numbers
    [own, built_in] = [r.plugin for r in report.results]
    assert own
    assert (own["name"], len(own["sha256"]), built_in) == ("my_method.py", 64, None)


def test_a_run_of_somebody_else_does_not_load_its_plugin(run: Path):
    plugins.unload()
    with pytest.raises(UserError, match=r"was trained with the plug-in my_method\.py, which is not loaded: name it"):
        restore(str(run))
    assert "my_method" not in sys.modules
    plugins.load(str(run / "plugins" / "my_method.py"))
    assert restore(str(run)).recipe.plugins


def test_a_changed_source_does_not_continue_a_run(run: Path, mine: Path, shards: Path, capsys: Any, tmp_path: Path):
    write_plugin(mine.parent, more="\n# One line more.\n")
    plugins.unload()
    line = refused(capsys, "pretrain", *arguments(mine, shards, run, *SHORT, "max_steps=6"))
    assert "holds another run: plugins is [" in line
    assert line.endswith(f"continue that run with `eagleray pretrain {run}`")
    state = weights(run)
    pretrain(str(run / "recipe.yaml"), *SHORT, f"out={run}")  # its own recipe, and the copy of the plug-in beside it
    assert_same(weights(run), state)


def test_an_equal_source_in_another_folder_continues_a_run(run: Path, mine: Path, shards: Path, tmp_path: Path):
    elsewhere = write_recipe(tmp_path / "elsewhere", f"[{write_plugin(tmp_path / 'other')}]")
    pretrain(*arguments(elsewhere, shards, run, *SHORT, "max_steps=6"))
    assert json.loads((run / "summary.json").read_text())["steps"] == 6


BROKEN = {
    "no_views": (
        "    views = (2, 2)",
        "",
        "'cosine_pairs' of the plug-in my_method: expected `views = (fewest, ",
    ),
    "no_forward": ("    def forward(", "    def forwards(", "does not define forward()"),
    "no_export": ("    def export(", "    def exports(", "does not define export()"),
    "no_loss": ('"loss": -', '"los": -', "CosinePairs.forward returned the keys ['los'], expected a dict with `loss`"),
    "wrong_base": (
        "class CosinePairs(Method)",
        "class CosinePairs(nn.Module)",
        "expected a subclass of eagleray.M",
    ),
    "no_type": ("dim: int = 8", "dim=8", "__init__: expected a type for dim, such as dim: int"),
    "a_tensor": ("spread: float = 1.0", "spread: Tensor = None", "a parameter has a type that recipes do not support"),
    "no_build": ("nn.Linear(backbone.dim, dim)", "1 / 0", "cannot be built: ZeroDivisionError: division by zero"),
    "export_of_something": ("return self.encoder.backbone", "return self", "export() returned a CosinePairs, expected"),
    "a_failing_callback": ('event="step"', "event=1 / 0", "Diary: step failed: ZeroDivisionError: division by zero"),
    "a_callback_of_nothing": (
        "class Diary(Callback)",
        "class Diary",
        "Diary: expected a subclass of eagleray",
    ),
    "a_failing_operation": ("out = crop.clone()", "out = crop / [0]", "view operation 'stripes' failed: TypeError"),
    "a_wrong_crop": (
        "    return out",
        "    return out.float()",
        "view operation 'stripes' returned torch.float32 (",
    ),
    "an_unknown_operation": ('register.view("stripes")', 'register.view("bars")', "known are bars, got 'stripes'"),
    "a_name_of_ours": ('register.method("cosine_pairs")', 'register.method("dino")', "unknown 'cosine_pairs'"),
    "an_import": ("import torch\n", "import touch\n", "my_method.py: cannot be imported: ModuleNotFoundError"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_plugin_is_one_line_and_status_2(case: str, mine: Path, shards: Path, tmp_path: Path, capsys: Any):
    old, new, wanted = BROKEN[case]
    path = mine.parent / "my_method.py"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    assert wanted in refused(capsys, "pretrain", *arguments(mine, shards, tmp_path / "out", *SHORT))


def test_a_method_of_ours_is_not_replaced(mine: Path, shards: Path, tmp_path: Path, capsys: Any):
    path = mine.parent / "my_method.py"
    path.write_text(path.read_text().replace("cosine_pairs", "dino"))
    line = refused(capsys, "pretrain", *arguments(mine, shards, tmp_path / "out", *SHORT, "method.name=dino"))
    assert "method.name: 'dino' already exists in eagleray; rename the one that my_method registers" in line


def test_a_failing_operation_in_a_loader_process(mine: Path, shards: Path, tmp_path: Path, capsys: Any):
    path = mine.parent / "my_method.py"
    path.write_text(path.read_text().replace("out = crop.clone()", "raise KeyError('colour')"))
    args = arguments(mine, shards, tmp_path / "out", *SHORT, "data.workers=1")
    assert "view operation 'stripes' failed: KeyError: 'colour'" in refused(capsys, "pretrain", *args)


def test_an_operation_that_this_process_does_not_know():
    with pytest.raises(PluginError, match="'stripes': this process has not loaded the plug-in that registers it"):
        operate("stripes", torch.zeros(3, 4, 4, dtype=torch.uint8), 0)
