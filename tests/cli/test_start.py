"""`eagleray pretrain` with `start` from start to end: what a run prints, keeps and refuses, and how it is resumed."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers.commands import refused
from helpers.recipes import small_recipe
from helpers.runs import FAST, arguments, assert_same, split, weights
from typer.testing import CliRunner

from eagleray.api import pretrain as api
from eagleray.base.errors import UserError
from eagleray.base.files import read_lines
from eagleray.cli import early, main
from eagleray.engine import checkpoint

pytestmark = pytest.mark.usefixtures("quick_runs")


def recipe(folder: Path, method: str) -> Path:
    (folder / f"{method}.yaml").write_text(small_recipe(method))
    return folder / f"{method}.yaml"


def run(*args: str) -> str:
    done = CliRunner().invoke(main.app, ["pretrain", *args], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture(scope="module")
def dino(quick_runs: None, shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of DINO that was stopped after three of its steps."""
    folder = tmp_path_factory.mktemp("source")
    api.pretrain(*split(arguments(recipe(folder, "dino"), shards, folder / "run", "max_steps=3", *FAST)))
    return folder / "run"


def test_esvit_goes_on_from_dino(dino: Path, shards: Path, tmp_path: Path):
    """At step 0 all that both have is equal to the bit, and after a step that moves nothing it still is."""
    out = tmp_path / "out"
    given = arguments(recipe(tmp_path, "esvit"), shards, out, f"start.from={dino}", "start.what=method", *FAST)
    still = ("max_steps=1", "optim.lr.value=0", "optim.lr.end=0", "method.momentum.value=1", "method.center_momentum=1")
    text = run(*given, *still)
    theirs, ours = weights(dino), weights(out)
    parts = ("teacher.backbone.", "teacher.head.", "student.backbone.", "student.head.", "center")
    shared = [k for k in theirs if k.startswith(parts)]
    assert len(shared) == len(theirs)
    assert_same({k: theirs[k] for k in shared}, {k: ours[k] for k in shared})
    assert f"started from {dino} (a run of dino after 3 steps)" in text
    assert "new: the source has none" in text
    table = (out / "start.txt").read_text()
    assert all(line in text for line in table.partition("\n\n")[0].splitlines())
    assert "matched    cls_token" in table
    assert "continuing from step" not in (out / "train.log").read_text(), "a start is no resume"


@pytest.mark.parametrize("more", [(), ("start.anchor=2", "optim.lr={value: 0.01}")], ids=["plain", "anchored"])
def test_a_started_run_is_resumed_as_if_it_had_not_stopped(
    more: tuple[str, ...], dino: Path, shards: Path, tmp_path: Path
):
    copy, once, twice = tmp_path / "copy", tmp_path / "once", tmp_path / "twice"
    shutil.copytree(dino, copy)
    given = [f"start.from={copy}", "start.what=method", *more, *FAST]
    run(*arguments(recipe(tmp_path, "esvit"), shards, once, "max_steps=4", *given))
    run(*arguments(recipe(tmp_path, "esvit"), shards, twice, "max_steps=2", *given))
    shutil.rmtree(copy)  # a resumed run reads its own checkpoints
    run(*arguments(recipe(tmp_path, "esvit"), shards, twice, "max_steps=4", *given))
    assert_same(weights(once), weights(twice))
    for key in ("loss", "anchor") if more else ("loss",):
        values = [[r[key] for r in read_lines(out / "metrics.jsonl")] for out in (once, twice)]
        assert values[0] == values[1]


def test_an_anchor_keeps_the_similarities_of_patches(dino: Path, shards: Path, tmp_path: Path):
    """At the start they are those of the start; a large weight holds them there, whatever the method wants."""
    far = {}
    for weight in (1e-9, 100):
        out = tmp_path / str(weight)
        keys = [f"start={{from: {dino}, anchor: {weight}}}", "optim.lr={value: 0.01}", *FAST]
        run(*arguments(recipe(tmp_path, "dino"), shards, out, "max_steps=12", *keys))
        lines = read_lines(out / "metrics.jsonl")
        assert lines[0]["anchor"] < 1e-10
        far[weight] = lines[-1]["anchor"]
        assert all("anchor" in line for line in lines)
    assert far[1e-9] > 1e-3
    assert far[100] < far[1e-9] / 3


def test_all_goes_on_at_the_step_of_the_source(dino: Path, shards: Path, tmp_path: Path):
    """With the same recipe it is the run that the source would have become."""
    whole, out = tmp_path / "whole", tmp_path / "out"
    shutil.copytree(dino, whole)
    name = recipe(tmp_path, "dino")
    run(*arguments(name, shards, whole, "max_steps=4", *FAST))
    given = arguments(name, shards, out, "max_steps=4", f"start.from={dino}", "start.what=all", *FAST)
    run(*given)
    assert_same(weights(whole), weights(out))
    assert [r["step"] for r in read_lines(out / "metrics.jsonl")] == [4]
    state = checkpoint.newest(out / "checkpoints")
    assert state is not None
    assert state["step"] == 4


@pytest.mark.slow
def test_heads_are_exported_and_taken_over(
    dino: Path, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    from eagleray.api.export import export

    out, folder = tmp_path / "out", tmp_path / "exported"
    export(dino, folder, heads=True)
    keys = (f"start.from={folder}", "start.what=method", *FAST)
    still = ("max_steps=1", "optim.lr.value=0", "optim.lr.end=0", "method.momentum.value=1", "method.center_momentum=1")
    assert "an export with heads" in run(*arguments(recipe(tmp_path, "dino"), shards, out, *keys, *still))
    theirs, ours = weights(dino), weights(out)
    kept = {k: v for k, v in theirs.items() if not k.startswith("student.backbone.")}
    assert_same(kept, {k: ours[k] for k in kept})
    assert torch.equal(ours["student.backbone.model.cls_token"], theirs["teacher.backbone.model.cls_token"])
    card = (folder / "README.md").read_text()
    [start, *_] = read_lines(dino / "starts.jsonl")
    assert all(f"{name}: digest {start[name]}" in card for name in ("data", "order", "code"))
    heads = (folder / "heads.safetensors").read_bytes()
    export(dino, folder, what="student")
    assert not (folder / "heads.safetensors").exists()
    (folder / "heads.safetensors").write_bytes(heads)
    line = refused(capsys, "pretrain", *arguments(recipe(tmp_path, "dino"), shards, tmp_path / "other", *keys))
    assert "an export whose heads.safetensors is of other weights, which has no heads" in line
    assert "--heads: not with --to onnx" in refused(capsys, "export", str(dino), "--to", "onnx", "--heads")


def test_sources_that_do_not_fit_are_refused_before_anything_begins(
    dino: Path, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out, name = tmp_path / "out", recipe(tmp_path, "dino")

    def line(*overrides: str) -> str:
        return refused(capsys, "pretrain", *arguments(name, shards, out, *FAST, *overrides))

    assert f"start.from={dino}: has 0.0% of" in line(f"start.from={dino}", "backbone.options.embed_dim=48")
    given = (f"start.from={dino}", "start.what=all")
    assert "has taken 3 steps, and this run takes 2 in all; give more optim.epochs" in line(*given, "max_steps=2")
    assert "its moments are of optim.name=adamw, not sgd" in line(*given, "optim.name=sgd")
    sharded = (f"start.from={dino}", "start.anchor=1", "parallel=fsdp")
    assert "start.anchor: does not work with parallel=fsdp" in line(*sharded)
    assert "start.anchor: input should be greater than or equal to 0, got -1" in line("start.anchor=-1", given[0])
    torch.save({"epoch": 3}, tmp_path / "none.pth")
    none = f"start.from={tmp_path}/none.pth"
    assert line(none) == f"error: {none}: holds no tensors by name; its keys are epoch"
    assert not (out / "recipe.yaml").exists()


def test_another_start_is_another_run(dino: Path, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    given = arguments(recipe(tmp_path, "dino"), shards, tmp_path / "out", "max_steps=1", *FAST)
    run(*given)
    assert "start.from is None there and" in refused(capsys, "pretrain", *given, f"start.from={dino}")
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["steps"] == 1


def test_what_a_run_starts_from_may_be_gone_when_the_run_in_a_store_has_begun(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Only the run itself asks the store, so the check before PyTorch is imported must not decide."""
    monkeypatch.setattr(early.store, "check_writable", lambda out, key: None)
    words = [f"data.train={shards / 'train'}", f"start.from={tmp_path / 'gone'}"]
    with pytest.raises(UserError, match="gone: no such run"):
        early.check_run("mocov3_vitxs8_shapes_demo", [*words, f"out={tmp_path / 'new'}"])
    early.check_run("mocov3_vitxs8_shapes_demo", [*words, "out=s3://runs/first"])
