"""Float16 on a simulated accelerator without bfloat16: the loop scales the loss, and waits for nothing."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.recipes import small_recipe
from helpers.simulated_device import DEVICE, simulated

from eagleray import config
from eagleray.config.schedule import Progress
from eagleray.data.batch import Batch
from eagleray.engine.loop import Trainer
from eagleray.engine.precision import Precision, compute_dtype, numerics
from eagleray.runs.build import build_method, build_optimizer
from eagleray.runs.recipe import Recipe

ROWS = 12


def batches(recipe: Recipe, steps: int, waits: list[str]) -> Iterator[tuple[Progress, Batch]]:
    """Yield batches on the device, and forget the waits of making them."""
    for step in range(steps):
        views = [torch.randn(ROWS, 3, v.size, v.size).to(DEVICE) for v in recipe.views for _ in range(v.count)]
        batch = Batch(views, torch.arange(ROWS).to(DEVICE), torch.arange(ROWS).to(DEVICE), (ROWS,))
        waits.clear()
        yield Progress(step, 4, 2), batch


@pytest.fixture
def old_device(monkeypatch: pytest.MonkeyPatch) -> None:
    module = torch.get_device_module(DEVICE)
    monkeypatch.setattr(module, "is_bf16_supported", lambda *, including_emulation: including_emulation, raising=False)


@pytest.mark.usefixtures("old_device")
@pytest.mark.parametrize("name", ["mocov3", "dino"])
def test_an_overflow_halves_the_scale_without_a_wait(name: str, tmp_path: Path) -> None:
    (path := tmp_path / "recipe.yaml").write_text(small_recipe(name))
    recipe = config.load(Recipe, path, ["data.train=none"])
    with simulated() as waits:
        assert compute_dtype("auto", DEVICE) == torch.float16
        precision = Precision.of(recipe.precision, DEVICE)
        precision.loss_scale.fill_(4.0)  # untrained heads of a few channels overflow with more
        with numerics(precision, deterministic=False):
            method = build_method(recipe).to(DEVICE)
            optimizer = build_optimizer(recipe, method)
            steps = Trainer(
                method, optimizer, lr=lambda _: 1e-3, weight_decay=lambda _: 0.0, precision=precision
            ).steps(batches(recipe, 4, waits))
            seen = []
            for i, step in enumerate(steps):
                assert not waits or i < 2, waits
                seen.append((float(step.values["skipped"]), float(step.values["loss_scale"])))
                if i == 1:
                    precision.loss_scale.fill_(2.0**40)
    assert seen == [(0, 4.0), (0, 4.0), (1, 2.0**40), (1, 2.0**39)]
