"""Where the memory of the simulated device is limited, `optim.micro_batch=auto` finds a micro-batch that fits."""

import gc
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.pictures import encode, picture, sample, write_tar
from helpers.recipes import small_recipe
from helpers.simulated_device import DEVICE, MEMORY, simulated

from eagleray import config
from eagleray.config.schedule import Progress
from eagleray.config.view import View
from eagleray.data.index import open_index
from eagleray.data.loader import Loader
from eagleray.data.packed import MOST
from eagleray.data.reader import Stream
from eagleray.engine.precision import Precision
from eagleray.runs import memory as auto
from eagleray.runs.build import build_method
from eagleray.runs.recipe import Recipe
from eagleray.views.sampling import Views

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


COLOURED = {"jitter": 0.8, "gray": 0.2, "blur": 0.5, "solarize": 0.2, "erasing": 0.3}


@pytest.mark.parametrize("crops", ["cpu", "device"])
def test_batches_ahead_take_no_more_than_is_kept_for_them(crops: Any, tmp_path: Path) -> None:
    """Two views of 24 pixels and two of 8, of images that show up to three times as many pixels as the views have."""
    views = Views.of([View(size=24, count=2, scale=(0.9, 1.0), **COLOURED), View(size=8, count=2, scale=(0.9, 1.0))])
    side = math.isqrt(int(MOST * (views.size**2).sum()))
    members = [m for key in range(48) for m in sample(key, encode(picture(key, side, side)))]
    write_tar(tmp_path / "shard-0.tar", members)
    stream = Stream(open_index(str(tmp_path), note=lambda _: None), views, 7, 4, 8)
    with simulated():
        loader = Loader(stream, rank=0, ranks=1, workers=0, device=DEVICE, crops=crops)
        kept = auto.bytes_ahead(loader)
        auto.reset_peak(DEVICE)
        before = auto.peak_memory(DEVICE)
        for batch, _ in loader.batches(0, 6):
            one = sum(view.nbytes for view in batch.views)
        taken = auto.peak_memory(DEVICE) - before - one
    pixels = one // 4
    assert one + pixels * (MOST if crops == "device" else 1) < taken <= kept < 2 * taken


def test_the_memory_of_batches_ahead_lowers_the_micro_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of("mocov3", tmp_path)
    gc.collect()
    with simulated():
        ours = build_method(recipe).to(DEVICE)
        precision, batch = Precision.of("auto", DEVICE), auto.blank_batch(recipe, ROWS, DEVICE)
        whole = auto.step_peak(ours, batch, AT, precision, 10_000, ours)
        monkeypatch.setattr(MEMORY, "size", int(1.1 * whole))
        chosen = []
        for ahead in (0, whole // 10, whole // 5):
            monkeypatch.setattr(auto, "bytes_ahead", lambda _, ahead=ahead: ahead)
            chosen.append(auto.choose_micro_batch(recipe, ours, precision, AT, ROWS, loader=Loader.__new__(Loader)))
    assert chosen[0] is not None
    assert chosen == sorted(set(chosen), reverse=True)
