"""A plan of a run whose weights are divided among ranks."""

from dataclasses import replace

import pytest
import torch
import yaml
from helpers.recipes import small_recipe

from eagleray.runs import accelerators
from eagleray.runs import recipe as recipes
from eagleray.runs.build import build_method
from eagleray.runs.forecast import TrainingSet, devices_of, forecast, remedies
from eagleray.runs.recipe import Recipe
from eagleray.runs.step_trace import (
    GATHERED,
    GRADIENTS,
    MOMENTS,
    TEACHER,
    WEIGHTS,
    divided,
    divisible,
    gathered,
    trace_step,
)

DATA = TrainingSet(100_000, 1e5)


@pytest.fixture
def dino() -> Recipe:
    return recipes.check(yaml.safe_load(small_recipe("dino")), "small")


def test_each_rank_has_its_share_and_what_is_gathered(dino: Recipe) -> None:
    whole = trace_step(dino, ranks=4, dataset=1000, dtype=torch.bfloat16, gpu=True)
    parts = divided(dino, whole, 4)
    for kind in (WEIGHTS, TEACHER, GRADIENTS, MOMENTS):
        assert parts.memory[kind] == pytest.approx(whole.memory[kind] / 4, abs=1)
    rest = whole.memory.keys() - {WEIGHTS, TEACHER, GRADIENTS, MOMENTS}
    assert {kind: parts.memory[kind] for kind in rest} == {kind: whole.memory[kind] for kind in rest}
    assert 0 < parts.memory[GATHERED] < whole.memory[WEIGHTS] + whole.memory[TEACHER] + whole.memory[GRADIENTS]
    assert parts.gradients > 1.5 * whole.gradients
    assert divided(dino, whole, 1) is whole


def test_all_but_the_blocks_is_gathered_and_two_of_them(dino: Recipe) -> None:
    more = replace(dino, backbone=replace(dino.backbone, options=dino.backbone.options | {"depth": 6}))
    few, many = build_method(dino), build_method(more)
    assert gathered(few) == gathered(many)
    block = sum(p.nbytes for p in few.student.backbone.model.blocks[0].parameters())  # type: ignore[union-attr, operator, index]
    outside = sum(p.nbytes * (1 + p.requires_grad) for n, p in few.named_parameters() if ".blocks." not in n)
    assert gathered(few) == outside + 2 * 2 * block


def test_a_plan_with_divided_weights_needs_less_and_is_named(dino: Recipe) -> None:
    options = {"embed_dim": 192, "depth": 4, "num_heads": 3, "patch_size": 8, "img_size": 16}
    large = replace(dino, backbone=replace(dino.backbone, options=options))
    target = devices_of("h100", accelerators.find("h100"), 8)
    whole, less = forecast(large, target, DATA), forecast(replace(large, parallel="fsdp"), target, DATA)
    assert less.memory_needed < whole.memory_needed
    tight = replace(target, memory=less.memory_needed + 1)
    assert any(keys == {"parallel": "fsdp"} for keys, _ in remedies(replace(whole, devices=tight)))
    assert divisible(large)
    assert not divisible(replace(large, parallel="fsdp"))
