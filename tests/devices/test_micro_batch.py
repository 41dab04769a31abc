"""Where the memory of the simulated device is limited, `optim.micro_batch=auto` finds a micro-batch that fits."""

import gc
import logging
from pathlib import Path

import pytest
import torch
from helpers.recipes import small_recipe
from helpers.runs import weights
from helpers.simulated_device import DEVICE, MEMORY, simulated
from helpers.simulated_runs import run_on_device, small_run

from eagleray import config
from eagleray.base.errors import UserError
from eagleray.config.schedule import Progress
from eagleray.engine.precision import Precision
from eagleray.runs import auto_micro_batch as auto
from eagleray.runs.build import build_method
from eagleray.runs.recipe import Recipe

AT, ROWS = Progress(15, 10, 2), (64,)


def recipe_of(method: str, folder: Path) -> Recipe:
    (path := folder / "recipe.yaml").write_text(small_recipe(method))
    return config.load(Recipe, path, ["data.train=none", "optim.micro_batch=auto"])


@pytest.mark.parametrize("method", ["mocov3", "dino"])
def test_a_chosen_micro_batch_fits(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(method, tmp_path)
    with simulated():
        ours = build_method(recipe).to(DEVICE)
        precision, batch = Precision.of("auto", DEVICE), auto.blank_batch(recipe, ROWS, DEVICE)
        whole = auto.step_peak(ours, batch, AT, precision, 10_000)
        chosen = []
        for share in (1.6, 1.2, 1.0, 0.9, 0.8):
            with monkeypatch.context() as patched:
                patched.setattr(MEMORY, "size", int(share * whole))
                chosen.append(auto.choose_micro_batch(recipe, ours, precision, AT, ROWS))
                assert auto.step_peak(ours, batch, AT, precision, chosen[-1] or 10_000) <= MEMORY.size
    assert chosen[0] is None
    sizes = [size for size in chosen if size]
    assert len(sizes) > 2
    assert sizes == sorted(sizes, reverse=True)


def test_a_run_is_divided_where_it_does_not_fit(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(name: str, *more: str) -> dict[str, torch.Tensor]:
        rare = ("max_steps=2", "evaluate.probe_epochs=0", "optim.batch=64", "optim.name=sgd", "precision=fp32")
        gc.collect()  # what earlier runs left behind
        MEMORY.reset()
        run_on_device(small_run("mocov3", shards, tmp_path / name, *rare, *more), monkeypatch)
        return weights(tmp_path / name)

    whole = run("whole")
    monkeypatch.setattr(MEMORY, "size", int(0.9 * MEMORY.peak))
    for name, x in run("auto", "optim.micro_batch=auto").items():
        torch.testing.assert_close(x, whole[name], rtol=1e-3, atol=1e-5, msg=name)
    with pytest.raises(UserError, match=r"^sim:0: its memory .* is exhausted in a training step with 64 images .*$"):
        run("plain")


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
