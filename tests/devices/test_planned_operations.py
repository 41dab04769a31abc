"""A step that is traced as on a GPU dispatches what one on the simulated device does, for every method."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import yaml
from helpers.recipes import METHODS, small_recipe
from helpers.simulated_device import DEVICE, simulated
from torch.utils._python_dispatch import TorchDispatchMode

from eagleray.engine.precision import Precision
from eagleray.models.token_linear import on_device
from eagleray.runs import recipe as recipes
from eagleray.runs import step_trace
from eagleray.runs.build import build_method, build_optimizer
from eagleray.runs.monitor import Monitor
from eagleray.runs.recipe import Recipe

IMAGES = 600


class Counting(TorchDispatchMode):
    """Counts the operations that work, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if step_trace.works(func):
            self.operations[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def taken(recipe: Recipe) -> Counter[str]:
    """Return the operations of the second step on the simulated device; the first creates moments and layouts."""
    with simulated(), Counting() as counting:
        method = build_method(recipe)
        method.allocate(IMAGES)
        on_device(method, DEVICE)
        optimizer = build_optimizer(recipe, method)
        monitor = Monitor(method, optimizer, replace(recipe.monitor, every=2**62), images=IMAGES)
        batch = step_trace.made_up(recipe, recipe.optim.batch, device=DEVICE)
        for step in step_trace.steps(recipe, method, optimizer, [batch, batch], Precision.of("auto", DEVICE)):
            operations = counting.operations
            monitor.watch(step)
            counting.operations = Counter()
    return operations


MIXED = [("supervised", {"mixup": 0.8}), ("drloc", {"mixup": 0.8})]  # a plan counts Mixup, CutMix has fewer


@pytest.mark.parametrize(("name", "keys"), [*((name, {}) for name in sorted(METHODS)), *MIXED])
def test_a_plan_has_the_operations_of_the_device(
    name: str, keys: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    text, traced = yaml.safe_load(small_recipe(name)), Counter[str]()
    recipe = recipes.check(text | {"method": text["method"] | keys}, "small")

    class Naming(step_trace.Tracer):
        def _count(self, func: Any, *given: Any) -> None:
            traced[func._schema.name] += 1
            super()._count(func, *given)

    monkeypatch.setattr(step_trace, "Tracer", Naming)
    found = step_trace.trace_step(recipe, ranks=1, dataset=IMAGES, dtype=torch.bfloat16, gpu=True)
    operations = taken(recipe)
    assert traced == operations
    assert found.operations == operations.total()
