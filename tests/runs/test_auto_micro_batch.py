"""The largest micro-batch that fits is chosen before training, and nothing else changes."""

import logging
from pathlib import Path

import pytest
import torch
from helpers.recipes import SMALL, small_recipe
from helpers.runs import arguments, assert_same, split, weights

from eagleray import config
from eagleray.api.pretrain import pretrain
from eagleray.config.schedule import Progress
from eagleray.engine.precision import Precision
from eagleray.methods.method import Method
from eagleray.runs import memory as auto
from eagleray.runs.build import build_method
from eagleray.runs.recipe import Recipe

CPU = torch.device("cpu")
AT = Progress(15, 10, 2)


def recipe_of(text: str, tmp_path: Path, *overrides: str) -> Recipe:
    (path := tmp_path / "small.yaml").write_text(text)
    return config.load(Recipe, path, ["data.train=none", "optim.micro_batch=auto", *overrides])


def build(recipe: Recipe) -> Method:
    method = build_method(recipe)
    method.allocate(64)
    return method.train()


@pytest.mark.parametrize("method", ["mocov3", "dino", "densecl", "instdisc", "pixpro", "swav"])
def test_a_trial_leaves_no_trace(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    recipe = recipe_of(small_recipe(method), tmp_path)
    ours, seen = build(recipe), []
    monkeypatch.setattr(auto, "reset_peak", lambda device: None)
    backbone = ours.export()
    monkeypatch.setattr(auto, "peak_memory", lambda _: seen.append((backbone.micro_batch, backbone.compiled)) or 7)
    backbone.compiled = True
    before = {n: t.clone() for n, t in ours.state_dict().items()}
    torch.manual_seed(3)
    batch = auto.blank_batch(recipe, (16,), CPU)
    assert auto.step_peak(ours, batch, AT, Precision.of("fp32", CPU), 4, ours) == 7
    assert seen == [(4, False)]  # the sizes of trials are not worth a compilation
    assert (backbone.micro_batch, backbone.compiled) == (None, True)
    assert_same(before, ours.state_dict())
    assert all(p.grad is None for p in ours.parameters())
    assert torch.equal(torch.rand(2), torch.rand(2, generator=torch.Generator().manual_seed(3)))


@pytest.mark.parametrize(("limit", "wanted"), [(1500, 44), (1400 + 1e-9, 34), (1180, 12)])
def test_the_peak_grows_along_a_line(limit: float, wanted: int):
    """A thousand bytes are always taken, and 10 for each image, plus 60 that do not grow."""
    steps = [1060 + 10 * size for size in auto.SIZES]
    assert auto.room(steps, [10 * size for size in auto.SIZES], limit) == pytest.approx(wanted)
    heads = [1180.0, 1180.0]  # which take more than the backbone with so few images
    assert auto.room(heads, [10 * size for size in auto.SIZES], limit) == pytest.approx(wanted)


@pytest.mark.slow
def test_nothing_is_measured_on_a_cpu_or_with_batch_norm(
    small: Path, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    lines: list[str] = []
    monkeypatch.setattr(logging.getLogger(auto.__name__), "info", lambda text, *args: lines.append(text % args))
    for name, keys in {"plain": [], "auto": ["optim.micro_batch=auto"]}.items():
        pretrain(*split(arguments(small, shards, tmp_path / name, "max_steps=3", "evaluate.probe_epochs=0", *keys)))
    assert_same(weights(tmp_path / "plain"), weights(tmp_path / "auto"))
    assert lines == ["optim.micro_batch=auto: no micro-batches, because a CPU's memory is not measured"]
    recipe = recipe_of(SMALL, tmp_path, "backbone={norm: batch}")
    assert auto.choose_micro_batch(recipe, build(recipe), Precision.of("fp32", CPU), AT, (32,)) is None
    assert "because the batch norm of the backbone needs the whole batch" in lines[-1]


def test_forwards_that_are_not_divided_are_held_together(tmp_path: Path):
    """Two views of 16 pixels and two of 8, which have a quarter of the pixels."""
    groups = auto.forwards(recipe_of(small_recipe("dino"), tmp_path), 10)
    assert groups == [(20, 0.25), (20, 1.0)]
    assert auto.held(groups, 20) == 25
    assert auto.held(groups, 19) == 19
    assert auto.held([(10, 1.0), (20, 0.25)], 12) == 13
