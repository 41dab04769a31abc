"""A step that is traced as on GPUs exchanges between ranks what two ranks on simulated devices do, with PyTorch's batch
norm over all ranks."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers.forked import start_ranks
from helpers.processes import free_port
from helpers.recipes import small_recipe
from helpers.simulated_device import DEVICE, simulated
from helpers.simulated_ranks import simulated_group
from torch.utils._python_dispatch import TorchDispatchMode

from eagleray.engine.precision import Precision
from eagleray.models import batch_norm
from eagleray.models.token_linear import on_device
from eagleray.runs import recipe as recipes
from eagleray.runs import step_trace
from eagleray.runs.build import build_method, build_optimizer
from eagleray.runs.monitor import Monitor
from eagleray.runs.recipe import Recipe

IMAGES = 600
RESNET = "{name: resnet10t, options: {channels: [8, 8, 16, 24], stem_width: 4}}"
CASES = {"mocov3": "", "simclr": "", "byol": "", "simsiam": RESNET, "dino": ""}


class Exchanges(TorchDispatchMode):
    """Counts the exchanges by their bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.found[step_trace.exchanged(func, args)] += 1
        return func(*args, **(kwargs or {}))


def recipe_of(method: str) -> Recipe:
    text = yaml.safe_load(small_recipe(method))
    return recipes.check(text | ({"backbone": yaml.safe_load(CASES[method])} if CASES[method] else {}), "small")


def _take_step(rank: int, port: int, out: Path) -> None:
    torch.set_num_threads(1)
    found = {}
    with simulated_group(rank, 2, port), simulated(), pytest.MonkeyPatch.context() as patched:
        patched.setattr(batch_norm, "KERNELS", (DEVICE.type,))
        for name in CASES:
            recipe = recipe_of(name)
            torch.manual_seed(0)
            method = build_method(recipe)
            method.allocate(IMAGES)
            on_device(method, DEVICE)
            batch_norm.sync_batch_norms(method, DEVICE)
            optimizer = build_optimizer(recipe, method)
            monitor = Monitor(method, optimizer, replace(recipe.monitor, every=2**62), images=IMAGES)
            batch = step_trace.made_up(recipe, recipe.optim.batch // 2, 2, DEVICE)
            with Exchanges() as exchanges:
                for step in step_trace.steps(recipe, method, optimizer, [batch], Precision.of("auto", DEVICE)):
                    monitor.watch(step)
            found[name] = exchanges.found
    torch.save(found, out / f"{rank}.pt")


def test_a_plan_has_the_exchanges_of_two_ranks(tmp_path: Path) -> None:
    start_ranks(_take_step, (free_port(), tmp_path))
    made = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2)]
    assert made[0] == made[1]
    for name in CASES:
        planned = step_trace.trace_step(recipe_of(name), ranks=2, dataset=IMAGES, dtype=torch.bfloat16, gpu=True)
        assert planned.exchanges == made[0][name], name
