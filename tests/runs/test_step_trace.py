"""A traced step takes the memory and the FLOPs of a real one, on any number of ranks and in micro-batches."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
import yaml
from helpers.recipes import small_recipe
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from eagleray.base import devices
from eagleray.engine.precision import Precision
from eagleray.protocols import throughput
from eagleray.runs import recipe as recipes
from eagleray.runs.build import build_method, build_optimizer
from eagleray.runs.recipe import Recipe
from eagleray.runs.step_trace import CPU, StepTrace, made_up, steps, trace_images, trace_step

FP32 = torch.float32


def recipe_of(method: str, **optim: object) -> Recipe:
    loaded = recipes.check(yaml.safe_load(small_recipe(method)), "small")
    return replace(loaded, optim=replace(loaded.optim, **optim))


def trace(recipe: Recipe, images: int = 32) -> StepTrace:
    return trace_images(recipe, images, ranks=1, dataset=600, dtype=FP32, gpu=False)


class Real:
    """A real step on the CPU."""

    def __init__(self, recipe: Recipe, images: int = 32) -> None:
        self.recipe, self.method = recipe, build_method(recipe)
        self.method.allocate(600)
        self.optimizer = build_optimizer(recipe, self.method)
        self.batch = made_up(recipe, images)
        self.step()  # which creates the moments

    def step(self) -> None:
        list(steps(self.recipe, self.method, self.optimizer, [self.batch], Precision(FP32, CPU)))

    def peak(self) -> int:
        state = [t for s in self.optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
        return throughput.peak(self.step, self.method, CPU) + sum(t.nbytes for t in (*state, *self.batch.views))


@pytest.mark.parametrize(
    "method", ["mocov3", "dino", "esvit", "moco", "swav", "drloc", "instdisc", "lejepa", "mae", "mpp", "pirl", "pixpro"]
)
def test_memory_and_flops_are_those_of_a_real_step(method: str):
    recipe = recipe_of(method)
    real, found = Real(recipe), trace(recipe)
    bank = found.memory["buffers"] - sum(b.nbytes for b in real.method.buffers())  # of the monitor
    assert found.peak - bank == pytest.approx(real.peak(), rel=0.03)
    with FlopCounterMode(display=False) as counter:
        real.step()
    assert found.flops == pytest.approx(counter.get_total_flops(), rel=1e-3)
    assert found.repeated == 0


@pytest.mark.parametrize("keys", [{"micro_batch": 32}, {"checkpointing": True}])
def test_what_is_computed_again_saves_memory_and_is_counted_apart(keys: dict[str, object]):
    plain, recipe = trace(recipe_of("mocov3"), 128), recipe_of("mocov3", **keys)
    found = trace(recipe, 128)
    assert found.peak < 0.9 * plain.peak
    assert found.flops == pytest.approx(plain.flops, rel=1e-3)
    # The last block, for the class token alone, is computed once.
    assert 0.08 * plain.flops < found.repeated < 0.35 * plain.flops
    assert found.peak == pytest.approx(Real(recipe, 128).peak(), rel=0.1)


def test_numbers_that_a_method_draws_are_made_up():
    recipe = recipe_of("drloc")
    mixed = {**recipe.method.args, "mixup": 0.8, "cutmix": 1.0}
    assert trace(replace(recipe, method=replace(recipe.method, args=mixed))).peak > 0


def test_many_micro_batches_are_extended_from_few(monkeypatch: pytest.MonkeyPatch):
    recipe = recipe_of("simclr", micro_batch=4)
    short = trace(recipe, 48)
    monkeypatch.setattr("eagleray.runs.step_trace.LONG", 100)
    whole = trace(recipe, 48)
    assert short.peak == pytest.approx(whole.peak, rel=0.05)
    assert short.flops == pytest.approx(whole.flops, rel=0.02)
    assert short.operations == pytest.approx(whole.operations, rel=0.02)


def test_ranks_share_the_batch_and_keep_buckets_of_gradients():
    recipe = recipe_of("mocov3")
    alone, shared = (trace_step(recipe, ranks=n, dataset=600, dtype=FP32, gpu=False) for n in (1, 4))
    assert (alone.images, shared.images) == (32, 8)
    assert shared.memory["activations"] < alone.memory["activations"]
    assert shared.memory["gradients"] == shared.gradients
    assert not torch.distributed.is_initialized()


def test_half_precision_takes_less_memory_than_float32():
    recipe = recipe_of("mocov3")
    half = trace_images(recipe, 256, ranks=1, dataset=600, dtype=torch.bfloat16, gpu=True)
    assert half.memory["activations"] < 0.8 * trace(recipe, 256).memory["activations"]
    assert any(not work.wide for work in half.work)


def test_batch_norms_over_all_ranks_exchange_their_moments():
    recipe = recipe_of("mocov3")
    alone = trace_step(recipe, ranks=1, dataset=600, dtype=torch.bfloat16, gpu=True)
    assert alone.exchanges == {}
    shared = trace_step(recipe, ranks=4, dataset=600, dtype=torch.bfloat16, gpu=True)
    norms = {n: m for n, m in build_method(recipe).named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)}
    expected: Counter[int] = Counter()  # the two views of a head exchange together
    for name, norm in norms.items():
        row = 4 * (2 * 2 * norm.num_features + 1)  # bytes: two numbers for each channel, and a count
        expected[4 * row // 2] += 1
        expected[4 * 2 * 2 * norm.num_features] += not name.startswith("momentum")  # which has no backward pass
    assert {size: shared.exchanges[size] for size in expected} == expected
    assert sum(expected.values()) == 13


def test_a_trace_as_on_a_gpu_leaves_the_cpu_as_it_was():
    with torch.autocast("cpu", torch.bfloat16):
        before = torch.ones(3, dtype=torch.bfloat16).exp().dtype
    trace_step(recipe_of("dino"), ranks=1, dataset=600, dtype=torch.bfloat16, gpu=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.ones(3, dtype=torch.bfloat16).exp().dtype == before
    assert not devices.is_accelerator(CPU)


def test_a_trace_leaves_the_random_numbers_alone():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    trace(recipe_of("simclr"))
    assert torch.equal(torch.rand(2), expected)
