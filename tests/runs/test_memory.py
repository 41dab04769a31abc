"""Exhausted memory ends a run with one line that says what to change."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.recipes import SMALL, small_recipe
from helpers.runs import arguments, split, start

from eagleray import config
from eagleray.api.pretrain import pretrain
from eagleray.base.errors import UserError
from eagleray.engine import checkpoint
from eagleray.methods.mocov3 import MoCoV3
from eagleray.runs.build import build_method
from eagleray.runs.memory import advice
from eagleray.runs.recipe import Recipe

SIZE = "CUDA out of memory. Tried to allocate 2.00 GiB."
HUNGRY = '''"""A method whose second step needs more memory than there is."""

import torch

from eagleray import register
from eagleray.methods.mocov3 import MoCoV3


@register.method("hungry")
class Hungry(MoCoV3):
    def forward(self, batch, at):
        if at.step == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().forward(batch, at)
'''


def test_a_step(small: Path, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    forward = MoCoV3.forward

    def hungry(self: MoCoV3, batch: Any, at: Any) -> dict[str, torch.Tensor]:
        if at.step == 3:
            raise torch.OutOfMemoryError(SIZE)
        return forward(self, batch, at)

    monkeypatch.setattr(MoCoV3, "forward", hungry)
    with pytest.raises(UserError) as e:
        pretrain(*split(arguments(small, shards, tmp_path / "out", "checkpoint.steps=2")))
    said = str(e.value)
    assert said == (
        "cpu: its memory is exhausted in a training step with 32 images on each rank; less memory is needed with "
        "optim.checkpointing=true, optim.micro_batch=8, more workers, a smaller views.size"
    )
    assert SIZE in (tmp_path / "out" / "train.log").read_text(), "where it happened"
    assert checkpoint.manifests(tmp_path / "out" / "checkpoints") == ["step-000000002"]


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        ([], ["optim.checkpointing=true", "optim.micro_batch=8"]),
        (["optim.checkpointing=true", "optim.micro_batch=8"], ["optim.micro_batch=2"]),
        (["optim.checkpointing=true", "optim.micro_batch=1"], []),
        (["backbone={norm: batch}"], ["optim.checkpointing=true"]),
    ],
)
def test_only_what_helps_is_named(overrides: list[str], wanted: list[str], tmp_path: Path):
    (path := tmp_path / "small.yaml").write_text(SMALL)
    recipe = config.load(Recipe, path, ["data.train=none", *overrides])
    assert [line for line in advice(recipe, build_method(recipe), 32) if line.startswith("optim.")] == wanted


@pytest.mark.parametrize(
    ("method", "ranks", "overrides", "named"),
    [
        ("mocov3", 2, [], True),
        ("mocov3", 1, [], False),
        ("mocov3", 2, ["optim.reduce=bf16"], False),
        ("simsiam", 2, [], False),
    ],
)
def test_divided_weights_are_named_where_they_are_allowed(
    method: str, ranks: int, overrides: list[str], named: bool, tmp_path: Path
):
    (path := tmp_path / "small.yaml").write_text(small_recipe(method))
    recipe = config.load(Recipe, path, ["data.train=none", *overrides])
    assert ("parallel=fsdp" in advice(recipe, build_method(recipe), 32, ranks)) == named


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_ray_does_not_try_again(shards: Path, tmp_path: Path):
    (tmp_path / "hungry.py").write_text(HUNGRY)
    recipe = tmp_path / "hungry.yaml"
    recipe.write_text(SMALL.replace("name: mocov3", "name: hungry") + "plugins: [hungry.py]\n")
    process = start(arguments(recipe, shards, tmp_path / "out", "workers=1"))
    text = process.communicate(timeout=400)[0]
    assert process.returncode == 2, text
    assert "in a training step with 32 images on each rank" in text.splitlines()[-1]
    assert (tmp_path / "out" / "starts.jsonl").read_text().count('"step"') == 1
