"""`eagleray finetune` from start to end: what a run takes over, says of it, and does when it is continued."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.commands import refused
from helpers.runs import FAST, arguments, assert_same, split, weights
from typer.testing import CliRunner

from eagleray.api import pretrain as api
from eagleray.base.files import read_lines
from eagleray.cli import main
from eagleray.cli.outcome import TIME_OVER

pytestmark = pytest.mark.usefixtures("quick_runs")


@pytest.fixture(scope="module")
def source(quick_runs: None, shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps."""
    from helpers.recipes import SMALL

    folder = tmp_path_factory.mktemp("source")
    (folder / "small.yaml").write_text(SMALL)
    api.pretrain(*split(arguments(folder / "small.yaml", shards, folder / "run", "max_steps=2", *FAST)))
    return folder / "run"


def finetune(source: Path, *args: str) -> dict[str, float]:
    done = CliRunner().invoke(main.app, ["finetune", str(source), *args, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_a_run_starts_from_the_weights_and_compares_with_untrained_ones(
    source: Path, small: Path, shards: Path, tmp_path: Path
):
    out = tmp_path / "out"
    summary = finetune(source, *arguments(small, shards, out, "max_steps=1", "optim.lr.value=0", *FAST))
    theirs, ours = weights(source), weights(out)
    backbone = [k for k in theirs if k.startswith("base_encoder.backbone.")]
    assert_same({k: theirs[k] for k in backbone}, {k: ours[k] for k in backbone})
    assert not torch.equal(theirs["predictor.0.weight"], ours["predictor.0.weight"]), "of the source's backbone alone"
    before = json.loads((source / "summary.json").read_text())
    assert summary["knn/top1_untrained"] == before["knn/top1_untrained"]
    lines = (out / "weights.txt").read_text().splitlines()
    assert lines[0] == (
        f"{source}: {len(backbone)} tensors matched, 0 resized, 0 missing, 0 left over; 100.0% of the backbone's "
        "parameters"
    )
    assert [line.split() for line in lines[1:]] == [["matched", k.split(".", 3)[3]] for k in backbone]


def test_a_continued_run_needs_the_weights_no_more(source: Path, small: Path, shards: Path, tmp_path: Path):
    copy, once, twice = tmp_path / "copy", tmp_path / "once", tmp_path / "twice"
    shutil.copytree(source, copy)
    finetune(copy, *arguments(small, shards, once, "max_steps=4", *FAST))
    finetune(copy, *arguments(small, shards, twice, "max_steps=2", *FAST))
    shutil.rmtree(copy)
    finetune(copy, *arguments(small, shards, twice, "max_steps=4", *FAST))
    assert_same(weights(once), weights(twice))
    losses = [[r["loss"] for r in read_lines(out / "metrics.jsonl")] for out in (once, twice)]
    assert losses[0] == losses[1]


def test_weights_of_another_architecture_are_refused_before_anything_begins(
    source: Path, small: Path, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    given = arguments(small, shards, tmp_path / "out", "backbone.options.depth=4")
    line = refused(capsys, "finetune", str(source), *given)
    assert f"backbone.weights={source}: has 57." in line
    assert "expected 95% or more; missing: blocks.2.norm1.weight; " in line
    line = refused(capsys, "finetune", str(tmp_path / "none"), *given)
    assert (
        line
        == f"error: backbone.weights={tmp_path}/none: no such run, checkpoint or file; a timm model is named timm:NAME"
    )
    assert not (tmp_path / "out" / "recipe.yaml").exists()


def test_what_was_typed_is_looked_for_before_what_the_recipe_names(
    source: Path, small: Path, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    given = arguments(small, shards, tmp_path / "out", f"data.test={tmp_path}/test")
    for name, command in (("backbone.weights", "finetune"), ("start.from", "pretrain")):
        typed = [str(tmp_path / "none")] if command == "finetune" else []
        more = [] if typed else [f"{name}={tmp_path}/none"]
        assert f"{name}={tmp_path}/none: no such run" in refused(capsys, command, *typed, *given, *more)
    line = refused(capsys, "finetune", str(source), *given)
    assert line.startswith(f"error: data.test: {tmp_path}/test: cannot be read: No such file")
    assert line.endswith("data.test=null")
    assert not (tmp_path / "out").exists(), "a command that is refused leaves no folder"


def test_it_ends_after_its_hours_as_pretraining_does(
    small: Path, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    given = list[float | None]()

    def see_through(*_: Any, hours: float | None) -> Any:
        given.append(hours)
        return SimpleNamespace(finished=False, time_over=True)

    monkeypatch.setattr(api, "see_through", see_through)
    args = arguments(small, shards, tmp_path / "out", "workers=0")
    ended = CliRunner().invoke(main.app, ["finetune", "timm:resnet18", *args, "--max-hours", "1.5"])
    assert (ended.exit_code, given) == (TIME_OVER, [1.5]), ended.output


def test_other_weights_are_another_run(
    source: Path, small: Path, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    given = arguments(small, shards, tmp_path / "out", "max_steps=1", *FAST)
    api.pretrain(*split(given))
    assert "backbone.weights is None there and" in refused(capsys, "finetune", str(source), *given)
