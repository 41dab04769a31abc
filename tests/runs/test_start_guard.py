"""What a run starts from is measured, watched and kept: the guard of `start`."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.commands import refused
from helpers.ranks import on_ranks
from helpers.recipes import small_recipe
from helpers.runs import FAST, arguments, assert_same, split
from PIL import Image

from eagleray.api import pretrain as api
from eagleray.base.errors import UserError
from eagleray.base.files import read_lines
from eagleray.datasets.shards import Sample, encode, write_shards
from eagleray.engine import checkpoint
from eagleray.models.ema import momentum_copies
from eagleray.protocols.crop_retrieval import share_found
from eagleray.protocols.image_batches import THREADS
from eagleray.runs import layout, pretrain
from eagleray.runs import recipe as recipes
from eagleray.runs.build import build_method
from eagleray.runs.plan import open_plan
from eagleray.runs.restore import restore
from eagleray.runs.sources import resolve_paths
from eagleray.runs.start_guard import StartGuard, cka, top1

pytestmark = pytest.mark.usefixtures("quick_runs")
COLOURS = (200, 60, 60), (60, 200, 60), (60, 60, 200), (200, 200, 60)
# A step without a learning rate, and then one after which features overflow on any machine.
DESTROYS = ("optim.name=sgd", "optim.lr.value=1e20", "optim.lr.warmup=1", "optim.clip=null")


def test_likeness_is_that_of_the_shape_of_a_cloud_of_features():
    torch.manual_seed(0)
    x, noise = torch.randn(300, 8), torch.randn(300, 8)
    turned = x @ torch.linalg.qr(torch.randn(8, 8)).Q
    assert cka(x, 3 * turned + 5) == pytest.approx(1, abs=1e-5)
    assert cka(x, noise) < 0.1
    assert cka(x, noise) < cka(x, x + noise) < cka(x, x + 0.1 * noise) < 1
    for small in 1e-3, 1e-4, 1e-5:
        assert cka(x, x + small * noise) < 1


def test_neighbours_are_other_images():
    labels = torch.tensor([0, 0, 0, 1, 1, 1])
    features = torch.nn.functional.one_hot(torch.tensor([0, 0, 0, 1, 1, 0]), 2).float()
    assert top1(features, labels) == pytest.approx(100 * 5 / 6)
    assert top1(torch.eye(6), torch.arange(6)) == 0


@pytest.fixture(scope="module")
def source(quick_runs: None, shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    (folder / "dino.yaml").write_text(small_recipe("dino"))
    api.pretrain(*split(arguments(folder / "dino.yaml", shards, folder / "run", *FAST)))
    return folder / "run"


def given(source: Path, shards: Path, out: Path, *more: str) -> tuple[str, list[str]]:
    return split(arguments(source.parent / "dino.yaml", shards, out, f"start.from={source}", *FAST, *more))


def states(out: Path) -> list[int]:
    return sorted(int(p.stem.partition("-")[2]) for p in (out / "checkpoints").glob("step-*.json"))


def test_the_start_is_measured_before_the_first_step(source: Path, shards: Path, tmp_path: Path):
    api.pretrain(*given(source, shards, tmp_path / "out", "max_steps=9", "monitor.every=6"))
    before = json.loads((tmp_path / "out" / layout.START_SCORES).read_text())
    theirs = json.loads((source / layout.SUMMARY).read_text())
    assert before["knn/top1"] == theirs["knn/top1"]  # DINO's teacher, by the same evaluation
    assert before["start/cka"] == pytest.approx(1, abs=1e-3)
    summary = json.loads((tmp_path / "out" / layout.SUMMARY).read_text())
    assert summary["knn/top1_start"] == before["knn/top1"]
    assert summary["knn/top1_untrained"] == theirs["knn/top1_untrained"]
    looks = {r["step"]: r["start/cka"] for r in read_lines(tmp_path / "out" / "metrics.jsonl") if "start/cka" in r}
    assert list(looks) == [1, 2, 3, 4, 6]  # twice per octave, then every six
    assert all(0 < value < 1 for value in looks.values())
    found = {line["kind"] for line in read_lines(tmp_path / "out" / layout.HEALTH)}
    assert found <= {"not above untrained"}  # nothing of the start is lost; nine steps may well teach nothing


def test_a_stop_changes_nothing_of_what_is_measured(source: Path, shards: Path, tmp_path: Path):
    out, whole = tmp_path / "out", tmp_path / "whole"
    for folder, steps in (out, 5), (out, 12), (whole, 12):
        api.pretrain(*given(source, shards, folder, f"max_steps={steps}", "monitor.every=4", "checkpoint.steps=4"))
    one, two = [checkpoint.newest(f / "checkpoints") for f in (out, whole)]
    assert one is not None
    assert two is not None
    assert_same(one["method"], two["method"])
    assert torch.equal(one["guard"]["first"], two["guard"]["first"])
    assert one["guard"]["scores"] == two["guard"]["scores"]
    numbers = [
        {r["step"]: {k: v for k, v in r.items() if k.startswith("start/")} for r in read_lines(f / "metrics.jsonl")}
        for f in (out, whole)
    ]
    assert numbers[0][8] == numbers[1][8] != {}
    assert numbers[0][12] == numbers[1][12] != {}


@pytest.fixture(scope="module")
def colours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of four colours, which any network tells apart that is not ruined."""
    folder, draw = tmp_path_factory.mktemp("colours"), np.random.default_rng(0)
    for part, count in ("train", 320), ("test", 80):
        images = (np.array(COLOURS[i % 4]) + draw.integers(-40, 40, (16, 16, 3)) for i in range(count))
        pixels = (x.clip(0, 255).astype(np.uint8) for x in images)
        samples = [Sample(f"{i:03d}", "png", encode(Image.fromarray(x)), i % 4) for i, x in enumerate(pixels)]
        write_shards(samples, str(folder / part), size=300_000)
    return folder


@pytest.mark.usefixtures("every_save")
def test_a_start_that_is_lost_is_found_and_ends_the_run(
    source: Path, colours: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out, keys = (
        tmp_path / "out",
        ("start.stop_below=0.5", "monitor.every=1", "checkpoint.steps=1", "checkpoint.keep=1", *DESTROYS),
    )
    _, overrides = given(source, colours, out, *keys)
    (name := tmp_path / "mocov3.yaml").write_text(small_recipe("mocov3"))  # it exports what is trained, not a mean
    line = refused(capsys, "pretrain", str(name), *overrides)
    found = [f for f in read_lines(out / layout.HEALTH) if f["kind"] == "start lost"]
    assert len(found) == 1, line
    assert found[0]["step"] <= 16
    assert (
        f"start.stop_below=0.5: {found[0]['text']}" in line
        or "start.stop_below=0.5: kNN of 320 training images fell" in line
    )
    assert "the checkpoint of step 0 is the best, and is kept" in line
    assert states(out) == [0, int(line.partition("step ")[2].partition(":")[0]) - 1]
    best = checkpoint.read(next((out / "checkpoints").glob("step-000000000*.pt")))
    theirs = checkpoint.newest(source / "checkpoints")
    assert theirs is not None
    trained = {k.replace("teacher", "base_encoder"): v for k, v in theirs["method"].items() if "teacher.backbone" in k}
    assert_same({k: v for k, v in best["method"].items() if k in trained}, trained)


@pytest.mark.usefixtures("every_save")
def test_a_run_ends_with_its_best_checkpoint_where_its_start_is_lost(source: Path, colours: Path, tmp_path: Path):
    out, keys = tmp_path / "out", ("start.stop_below=0.5", "start.keep_best=true", "monitor.every=1", *DESTROYS)
    _, overrides = given(source, colours, out, "checkpoint.steps=1", "checkpoint.keep=1", *keys)
    (name := tmp_path / "mocov3.yaml").write_text(small_recipe("mocov3"))
    run = api.pretrain(str(name), overrides)
    assert run.finished
    summary = run.summary
    assert (summary["exported_step"], summary["ended_early"]) == (0, 1)
    assert 0 < summary["steps"] <= 16
    assert summary["verdict"][0].startswith(
        "ended early, as features got worse; exports its best checkpoint, of step 0:"
    )
    assert summary["knn/top1"] == summary["knn/top1_start"]
    trained = restore(str(source)).method.export().state_dict()
    assert_same(restore(str(out)).method.export().state_dict(), trained)
    (out / layout.SUMMARY).unlink()  # its process died in the evaluation
    again = api.pretrain(str(name), overrides).summary
    equal = "steps", "exported_step", "ended_early", "knn/top1", "verdict"
    assert [again[key] for key in equal] == [summary[key] for key in equal]


@pytest.mark.usefixtures("every_save")
def test_the_best_of_all_checkpoints_is_exported_also_after_all_steps(
    source: Path, colours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    written: list[dict[str, torch.Tensor]] = []
    monkeypatch.setattr(pretrain, "write_export", lambda backbone, *_: written.append(backbone.state_dict()))

    def run(*keys: str) -> tuple[Path, dict[str, Any]]:
        out = tmp_path / f"out{len(keys)}"
        every = ("checkpoint.steps=1", "checkpoint.keep=99", "monitor.every=1", "max_steps=6", "optim.lr.value=0.3")
        return out, api.pretrain(*given(source, colours, out, *every, *keys)).summary

    out, summary = run("start.keep_best=true")
    best = {step: checkpoint.newest(out / "checkpoints", step=step) for step in states(out)}
    known = [state["guard"]["best"] for state in best.values() if state]
    assert summary["exported_step"] == known[-1][1]
    assert summary["ended_early"] == 0
    assert known[-1][0] == max(value for value, _ in known)
    chosen = best[summary["exported_step"]]
    assert chosen is not None
    [exported] = written
    assert_same(exported, {k: chosen["method"][f"teacher.backbone.{k}"] for k in exported})
    assert "exported_step" not in run()[1]


def test_without_labels_the_crops_found_decide(source: Path, shards: Path, tmp_path: Path):
    def watched(*more: str) -> StartGuard:
        name, overrides = given(source, shards, tmp_path / "out", *more)
        return StartGuard(open_plan(resolve_paths(recipes.load(name, overrides))))

    guard = watched("start.stop_below=0.6")
    guard.labelled = False
    guard.scores = {"start/found": 50.0}
    for value, lost in (25.0, False), (24.0, True):  # of 320 images, 5.6 are noise
        guard.seen = 7, {"start/found": value}
        assert bool(guard.lost()) == lost
    assert guard.lost().startswith("step 7: start.stop_below=0.6: crops found of 320 training images fell from 50.0 to")
    assert [f.step for f in guard.findings()] == [7]
    assert not guard.findings()  # once
    again = watched("start.stop_below=0.6")
    again.load_state_dict(guard.state_dict() | {"scores": guard.scores})
    again.labelled, again.seen = False, (9, {"start/found": 4.0})
    assert not again.findings()  # also after a restart
    assert not watched().lost()


def test_crops_are_found_that_features_tell_apart():
    first = torch.eye(4)
    assert share_found(first, first[[0, 1, 3, 2]]) == 50
    assert share_found(first, first.roll(1, 0)) == 0


@pytest.mark.parametrize(
    ("freeze", "looks"), [("0", [1, 2, 3, 4, 6, 8, 10, 20]), ("0.25", [4, 5, 6, 7, 9, 10, 11, 20])]
)
def test_it_looks_more_often_when_the_backbone_begins_to_change(
    source: Path, shards: Path, tmp_path: Path, freeze: str, looks: list[int]
):
    """Ten steps are an epoch: 2.5 steps are three."""
    name, overrides = given(source, shards, tmp_path / "out", f"start.freeze={freeze}", "monitor.every=10")
    guard = StartGuard(open_plan(resolve_paths(recipes.load(name, overrides))))
    assert [step for step in range(1, 21) if guard.due(step)] == looks


def test_a_start_no_better_than_a_guess_cannot_be_lost(source: Path, shards: Path, tmp_path: Path):
    name, overrides = given(source, shards, tmp_path / "out", "start.stop_below=0.9")
    guard = StartGuard(open_plan(resolve_paths(recipes.load(name, overrides))))
    guard.labels = torch.arange(320) % 100  # a guess is right once in a hundred times
    for before, lost in (2.0, False), (20.0, True):
        guard.scores, guard.seen, guard.told = {"start/knn": before}, (7, {"start/knn": 0.0}), False
        assert bool(guard.lost()) == lost
        assert bool(guard.findings()) == lost


def test_a_finding_needs_less_than_an_end(source: Path, shards: Path, tmp_path: Path):
    """Of 320 images 40 % are right within 5.5, and 90 % within 3.4, which is less than a tenth of them."""
    name, overrides = given(source, shards, tmp_path / "out", "start.stop_below=0.9")
    guard = StartGuard(open_plan(resolve_paths(recipes.load(name, overrides))))
    guard.labels = torch.arange(320) % 100
    for before, now, found, lost in (
        (40.0, 35.0, False, False),
        (40.0, 34.0, True, False),
        (40.0, 31.0, True, False),
        (40.0, 30.0, True, True),
        (90.0, 82.0, False, False),
        (90.0, 80.0, True, False),
        (90.0, 77.0, True, True),
    ):
        guard.scores, guard.seen, guard.told = {"start/knn": before}, (7, {"start/knn": now}), False
        assert bool(guard.lost()) == lost, now
        assert bool(guard.findings()) == found, now


@pytest.mark.usefixtures("every_save")
def test_a_frozen_backbone_stays_while_heads_are_warmed(source: Path, shards: Path, tmp_path: Path):
    """Ten steps are an epoch."""
    keys = ("start.freeze=0.5", "checkpoint.steps=1", "checkpoint.keep=99", "max_steps=7", "method.freeze_last=0")
    api.pretrain(*given(source, shards, tmp_path / "out", *keys))
    read = [checkpoint.read(p) for p in sorted((tmp_path / "out" / "checkpoints").glob("step-*.pt"))]
    first, *others = read
    assert first["step"] == 0
    assert others[0]["step"] <= 5
    assert others[-1]["step"] == 7
    for state in others:
        moved = {k for k, v in state["method"].items() if not torch.equal(v, first["method"][k])}
        assert any(k.startswith("student.backbone.") for k in moved) == (state["step"] > 5), state["step"]
        assert any(k.startswith("student.head.") for k in moved) or state["step"] == 1  # of rate 0
        assert any(k.startswith("teacher.backbone.") for k in moved) == (state["step"] > 5), state["step"]
    assert "frozen encoder" not in {f["kind"] for f in read_lines(tmp_path / "out" / layout.HEALTH)}


@pytest.mark.usefixtures("every_save")
def test_the_teacher_of_a_method_stays_while_heads_are_warmed(source: Path, shards: Path, tmp_path: Path):
    """It is another network than the student, which it would become."""
    keys = ("start.what=method", "start.freeze=0.5", "checkpoint.steps=1", "checkpoint.keep=99", "max_steps=7")
    api.pretrain(*given(source, shards, tmp_path / "out", *keys))
    first, *others = [checkpoint.read(p) for p in sorted((tmp_path / "out" / "checkpoints").glob("step-*.pt"))]
    assert first["step"] == 0
    for state in others:
        moved = {k for k, v in state["method"].items() if not torch.equal(v, first["method"][k])}
        assert any(k.startswith("teacher.backbone.") for k in moved) == (state["step"] > 5), state["step"]
        assert any(k.startswith("teacher.head.") for k in moved) or state["step"] == 1


def measured(name: str, overrides: list[str], images: int | None = None) -> dict[str, Any]:
    plan = open_plan(resolve_paths(recipes.load(name, overrides)))
    guard, method = StartGuard(plan), build_method(plan.recipe)
    if images:
        guard.samples, guard.labelled = guard.samples[:images], False
    guard.measure(0, method.export, "fp32", THREADS)
    [(_, online)] = momentum_copies(method)
    with torch.no_grad():
        for p in online.parameters():  # the student; what is exported is the teacher
            p.mul_(1.5)
    return guard.measure(1, lambda: online.backbone, "fp32", THREADS) | {"first": guard.first}  # type: ignore[union-attr,operator]


def test_ranks_measure_what_one_process_measures(source: Path, shards: Path, tmp_path: Path):
    name, overrides = given(source, shards, tmp_path / "out")
    one = measured(name, overrides)
    for each in on_ranks(3, measured, tmp_path, name, overrides):
        torch.testing.assert_close(each.pop("first"), one["first"])
        assert each == pytest.approx({k: v for k, v in one.items() if k != "first"}, rel=1e-4)
    assert one["start/cka"] < 1


def test_a_rank_without_images_measures_with_the_others(source: Path, shards: Path, tmp_path: Path):
    name, overrides = given(source, shards, tmp_path / "out")
    one, first = measured(name, overrides, 2), "first"
    for each in on_ranks(3, measured, tmp_path, name, overrides, 2):
        torch.testing.assert_close(each.pop(first), one[first])
        assert each == pytest.approx({k: v for k, v in one.items() if k != first}, rel=1e-4)


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        (("start.freeze=2",), "start.freeze=2: the backbone would never be trained, with optim.epochs=2"),
        (("start.freeze=1", "start.what=all"), "start.freeze: does not work with start.what=all"),
        (("start.freeze=-1",), "start.freeze"),
        (("start.stop_below=1.5",), "start.stop_below"),
    ],
)
def test_what_cannot_be_is_one_line(
    keys: tuple[str, ...],
    line: str,
    source: Path,
    shards: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    name, overrides = given(source, shards, tmp_path / "out", *keys)
    assert line in refused(capsys, "pretrain", name, *overrides)


def test_a_run_from_before_the_guard_goes_on_without(source: Path, shards: Path, tmp_path: Path):
    name, overrides = given(source, shards, tmp_path / "out", "start.stop_below=0.9")
    guard = StartGuard(open_plan(resolve_paths(recipes.load(name, overrides))))
    guard.load_state_dict({})
    assert not guard.due(1)
    assert not guard.lost()
    assert guard.state_dict() == {}
    with pytest.raises(UserError, match="unknown key"):
        recipes.load(name, [*overrides, "start.stop_bellow=0.9"])


def test_a_start_is_compared_with_what_is_measured_in_the_same_way(source: Path, shards: Path, tmp_path: Path):
    for steps, more in (1, ()), (2, ("evaluate.k=3",)):
        run = api.pretrain(*given(source, shards, tmp_path / "out", f"max_steps={steps}", *more))
        assert ("knn/top1_start" in run.summary) == (not more)


def test_a_checkpoint_that_was_not_saved_is_not_the_best(source: Path, shards: Path, tmp_path: Path):
    name, overrides = given(source, shards, tmp_path / "out", "start.keep_best=true")
    guard = StartGuard(open_plan(resolve_paths(recipes.load(name, overrides))))
    for step, score, kept, best in (
        (0, 50.0, True, 0),
        (4, 60.0, True, 4),
        (8, 55.0, False, 8),
        (12, 52.0, False, 12),
        (16, 40.0, False, 0),
    ):
        guard.seen = step, {guard.key: score}
        assert guard.saved(kept=kept) == best == guard.returns
