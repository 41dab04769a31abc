"""Runs that train adapters: they begin as their start, go on as if never stopped, and export merged weights."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.recipes import CNN_ONLY, METHODS, small_recipe
from helpers.runs import FAST, arguments, assert_same, split, weights
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import eagleray
from eagleray.api.pretrain import pretrain
from eagleray.base.errors import UserError
from eagleray.base.files import read_lines
from eagleray.engine import checkpoint
from eagleray.models.backbone import Backbone
from eagleray.models.layer_names import in_adapter, in_backbone
from eagleray.runs import recipe as recipes
from eagleray.runs.build import build_method
from eagleray.runs.checks import check_method
from eagleray.runs.method_checks import check_resume, difference, rehearse, rehearse_on_ranks
from eagleray.runs.recipe import Recipe
from eagleray.runs.start import build_started
from eagleray.runs.step_trace import TEACHER, WEIGHTS, trace_step

pytestmark = pytest.mark.usefixtures("untracked_runs")

BATCH = 12
LORA = ("backbone.lora.rank=4", "backbone.lora.targets=[qkv,proj,fc2]")
BOTH = ("dino", "simclr")  # a method with a teacher, and one without


def recipe_of(folder: Path, method: str, *keys: str) -> Recipe:
    (path := folder / f"{method}.yaml").write_text(small_recipe(method))
    return recipes.load(str(path), ["data.train=none", *keys])


def start_of(folder: Path, method: str) -> str:
    """A file with the weights of a backbone of other values than a run begins with."""
    backbone = Backbone(**recipe_of(folder, method).backbone.arguments)
    torch.manual_seed(9)
    with torch.no_grad():
        for p in backbone.parameters():
            p.add_(torch.randn_like(p), alpha=0.02)
    save_file(backbone.model.state_dict(), path := folder / "start.safetensors")
    return str(path)


@pytest.mark.parametrize("method", sorted(METHODS.keys() - {*CNN_ONLY}))
def test_every_method_trains_adapters_and_heads_alone(method: str, tmp_path: Path):
    done = rehearse(recipe_of(tmp_path, method, *LORA), (BATCH,), steps=range(5, 7), own_optimizer=True)
    trained = {n for n in done.gradient if in_backbone(n)}
    assert trained
    assert all(map(in_adapter, trained))
    fresh = build_method(recipe_of(tmp_path, method, *LORA)).state_dict()
    still = {n for n, x in done.method.items() if n in fresh and torch.equal(x, fresh[n])}
    assert {n for n in fresh if in_backbone(n) and not in_adapter(n)} <= still
    assert not trained & still
    heads = {n for n, p in build_method(recipe_of(tmp_path, method)).named_parameters() if p.requires_grad}
    assert {n for n in done.gradient if not in_backbone(n)} == {n for n in heads if not in_backbone(n)}


@pytest.mark.parametrize("method", BOTH)
def test_micro_batches_give_the_gradient_of_the_whole(method: str, tmp_path: Path):
    recipe = recipe_of(tmp_path, method, *LORA)
    parts = replace(recipe, optim=replace(recipe.optim, micro_batch=5))
    ours, want = (rehearse(r, (BATCH,), steps=range(5, 7)).gradient for r in (parts, recipe))
    assert difference(ours, want) < 1e-5


@pytest.mark.parametrize("method", BOTH)
def test_a_checkpoint_holds_all_there_is(method: str, tmp_path: Path):
    check_resume(method, recipe_of(tmp_path, method, *LORA), (BATCH,))


def test_two_ranks_learn_what_one_does(tmp_path: Path):
    named = {method: recipe_of(tmp_path, method, *LORA) for method in BOTH}
    for (method, _), two in rehearse_on_ranks(named, [(7, 5)]).items():
        one = rehearse(named[method], (BATCH,))
        assert difference(two.gradient, one.gradient) < 1e-5
        assert two.losses == pytest.approx(one.losses, rel=1e-4)


@pytest.fixture(scope="module")
def runs(untracked_runs: None, shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a start, a run of 6 steps, one that was stopped after 2, and one without adapters."""
    folder = tmp_path_factory.mktemp("lora")
    (folder / "dino.yaml").write_text(small_recipe("dino"))
    keys = [f"backbone.weights={start_of(folder, 'dino')}", "monitor.every=2", "optim.lr.warmup=0", *FAST]
    for out, steps, more in (("once", 6, LORA), ("twice", 2, LORA), ("twice", 6, LORA), ("full", 6, ())):
        args = arguments(folder / "dino.yaml", shards, folder / out, f"max_steps={steps}", "optim.epochs=3")
        pretrain(*split([*args, *keys, *more]))
    return folder


def test_stopping_and_continuing_equals_no_stop(runs: Path):
    assert_same(weights(runs / "once"), weights(runs / "twice"))


def test_the_weights_of_the_start_stay_and_have_no_moments(runs: Path):
    state, start = checkpoint.newest(runs / "once" / "checkpoints"), load_file(runs / "start.safetensors")
    assert state is not None
    for role in "student", "teacher":
        for name, value in start.items():
            assert torch.equal(state["method"][f"{role}.backbone.model.{name}"], value)
    low, full = ((runs / out / "checkpoints" / "step-000000006.pt").stat().st_size for out in ("once", "full"))
    backbone = sum(x.nbytes for x in start.values())
    assert full - low > backbone, "two moments, less the adapters"


def test_the_export_is_merged_and_the_adapters_lie_beside_it(runs: Path):
    folder = runs / "once" / "export"
    exported, unmerged = eagleray.load(folder), build_method(recipes.load(str(runs / "once"))).eval()
    unmerged.load_state_dict(weights(runs / "once"))
    images = torch.randn(4, 3, 16, 16)
    for theirs, ours in zip(exported(images)[:2], unmerged.export()(images)[:2], strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-5)
    again = eagleray.load(runs / "once").model
    assert again.state_dict().keys() == exported.model.state_dict().keys()
    with safe_open(folder / "lora.safetensors", "pt") as opened:
        about = opened.metadata()
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  it is no dictionary
    settings = {key: json.loads(about[key]) for key in ("rank", "alpha", "blocks", "targets")}
    assert settings == {"rank": 4, "alpha": 16.0, "blocks": None, "targets": ["qkv", "proj", "fc2"]}
    start = load_file(runs / "start.safetensors")
    assert len(tensors) == 2 * 2 * 3
    for name, value in exported.model.state_dict().items():
        layer, merged = name.removesuffix(".weight"), start[name]
        if f"{layer}.a" in tensors:
            merged = merged + 16.0 / 4 * tensors[f"{layer}.b"] @ tensors[f"{layer}.a"]
            assert not torch.equal(merged, start[name])
        torch.testing.assert_close(value, merged)
    other = eagleray.export(runs / "once", runs / "other").parent
    facts = [eagleray.verify(place).facts for place in (folder, other)]
    assert {f.parameters for f in facts} == {sum(p.numel() for p in exported.parameters())}
    assert load_file(other / "lora.safetensors").keys() == tensors.keys()
    assert not (runs / "full" / "export" / "lora.safetensors").exists()


def test_the_monitor_measures_steps_against_all_weights(runs: Path):
    """B begins at zero, so that measured against itself it would seem to grow without bounds."""
    [first, *_] = [r for r in read_lines(runs / "once" / "metrics.jsonl") if "health/growth" in r]
    assert first["health/growth"] < 1.1
    assert 0 < first["health/update"] < 0.05
    found = {f["kind"] for f in read_lines(runs / "once" / "health.jsonl")}
    assert not found & {"too large steps", "frozen encoder", "no momentum"}


def test_a_run_with_adapters_is_a_start_like_any_other(runs: Path):
    recipe = recipe_of(runs, "dino", f"start.from={runs / 'once'}", "start.what=method", *LORA)
    method = build_started(recipe, 40).method
    whole, state = eagleray.load(runs / "once").model.state_dict(), method.state_dict()
    for role in "student", "teacher":
        assert all(torch.equal(state[f"{role}.backbone.model.{name}"], value) for name, value in whole.items())
    assert torch.equal(state["center"], weights(runs / "once")["center"])
    with pytest.raises(UserError, match="whose moments and step cannot be taken over"):
        build_started(recipe_of(runs, "dino", f"start.from={runs / 'once'}", "start.what=all"), 40)


def test_a_forecast_counts_shared_weights_once(tmp_path: Path):
    def traced(*keys: str) -> dict[str, int]:
        recipe = recipe_of(tmp_path, "dino", *keys)
        return trace_step(recipe, ranks=1, dataset=40, dtype=torch.float32, gpu=False).memory

    low, full = traced(*LORA), traced()
    method = build_method(recipe_of(tmp_path, "dino", *LORA))
    shared = sum(p.nbytes for n, p in method.named_parameters() if in_backbone(n) and not in_adapter(n))
    adapters = sum(p.nbytes for n, p in method.named_parameters() if in_adapter(n)) // 2
    assert full[TEACHER] - low[TEACHER] == shared - adapters
    assert low[WEIGHTS] - full[WEIGHTS] == adapters
    assert low["moments"] < full["moments"]


REFUSED = {
    (): "backbone.lora: random weights would stay as they are; expected backbone.weights or start.from",
    ("start.from=x", "start.what=all"): "start.what=all: does not work with backbone.lora, whose adapters are new; use",
    ("start.from=x", "parallel=fsdp"): "parallel=fsdp: does not work with backbone.lora; leave it out",
    ("start.from=x", "backbone.lora.blocks=9"): "backbone.lora.blocks=9: VisionTransformer has 2 blocks",
}


@pytest.mark.parametrize("keys", REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(keys: tuple[str, ...], tmp_path: Path):
    with pytest.raises(UserError) as e:
        check_method(recipe_of(tmp_path, "dino", *LORA, *keys))
    assert str(e.value).startswith(REFUSED[keys])
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("value", ["targets=[q]", "targets=[]", "rank=0", "alpha=0", "blocks=0", "depth=1"])
def test_values_that_are_none_are_refused_by_their_key(value: str, tmp_path: Path):
    with pytest.raises(UserError, match=rf"backbone\.lora\.{value.partition('=')[0]}"):
        recipe_of(tmp_path, "dino", f"backbone.lora.{value}")


def test_a_frozen_teacher_has_no_adapters(tmp_path: Path):
    with pytest.raises(UserError, match=r"method\.teacher\.lora"):
        recipe_of(tmp_path, "distill", "method.teacher.lora.rank=4")
