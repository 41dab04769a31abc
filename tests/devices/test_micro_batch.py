"""Where the memory of the simulated device is limited, `optim.micro_batch=auto` finds a micro-batch that fits."""

import gc
import logging
from pathlib import Path

import pytest
import torch
from helpers.recipes import small_recipe
from helpers.simulated_device import DEVICE, MEMORY, simulated

from eagleray import config
from eagleray.config.schedule import Progress
from eagleray.engine.precision import Precision
from eagleray.runs import memory as auto
from eagleray.runs.build import build_method
from eagleray.runs.recipe import Recipe

AT, ROWS = Progress(15, 10, 2), (64,)


def recipe_of(method: str, folder: Path) -> Recipe:
    (path := folder / "recipe.yaml").write_text(small_recipe(method))
    return config.load(Recipe, path, ["data.train=none", "optim.micro_batch=auto"])


@pytest.mark.parametrize("method", ["mocov3", pytest.param("dino", marks=pytest.mark.slow)])
def test_a_chosen_micro_batch_fits(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(method, tmp_path)
    gc.collect()  # tensors of earlier tests would take a part of the memory
    with simulated():
        ours = build_method(recipe).to(DEVICE)
        precision, batch = Precision.of("auto", DEVICE), auto.blank_batch(recipe, ROWS, DEVICE)
        whole = auto.step_peak(ours, batch, AT, precision, 10_000, ours)
        chosen = []
        for share in (1.6, 1.2, 1.0, 0.9, 0.8):
            with monkeypatch.context() as patched:
                patched.setattr(MEMORY, "size", int(share * whole))
                chosen.append(auto.choose_micro_batch(recipe, ours, precision, AT, ROWS))
                assert auto.step_peak(ours, batch, AT, precision, chosen[-1] or 10_000, ours) <= MEMORY.size
    assert chosen[0] is None
    sizes = [size for size in chosen if size]
    assert len(sizes) > 2
    assert sizes == sorted(sizes, reverse=True)


def test_a_device_that_does_not_tell_its_memory_gets_no_micro_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def untold(device: object) -> None:
        raise RuntimeError("not of this device")

    lines: list[str] = []
    monkeypatch.setattr(logging.getLogger(auto.__name__), "info", lambda text, *args: lines.append(text % args))
    recipe = recipe_of("mocov3", tmp_path)
    with simulated():
        monkeypatch.setattr(torch.accelerator, "get_memory_info", untold)
        ours = build_method(recipe).to(DEVICE)
        assert auto.choose_micro_batch(recipe, ours, Precision.of("auto", DEVICE), AT, ROWS) is None
    assert lines == [
        "optim.micro_batch=auto: no micro-batches, because PyTorch does not tell how much memory a sim device has"
    ]
