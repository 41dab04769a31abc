"""Crops made on the simulated device: the batches are those of crops made by readers, and a run may change over."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.pictures import write_shards
from helpers.runs import assert_same, weights
from helpers.simulated_device import DEVICE, simulated
from helpers.simulated_runs import quiet_waits, run_on_device, small_run
from torch import Tensor

from eagleray.base.errors import UserError
from eagleray.config.view import View
from eagleray.data import packed
from eagleray.data.index import open_index
from eagleray.data.loader import Loader
from eagleray.data.reader import Stream
from eagleray.views.sampling import Views

VIEWS = Views.of([View(size=16, count=2, blur=0.5), View(size=8, scale=(0.05, 0.3), interpolation="bilinear")])
SMALLER = Views.of([View(size=12, count=2, blur=0.5), View(size=8, scale=(0.05, 0.3), interpolation="bilinear")])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("shards"), 65, 3, broken=(5, 17, 40))


def stream(folder: Path, **more: Any) -> Stream:
    return Stream(open_index(str(folder), note=lambda _: None), VIEWS, 7, 4, 8, **more)


def read(s: Stream, crops: Any, workers: int = 0, *, start: int = 0, stop: int = 10) -> list[tuple[list[Tensor], Any]]:
    """The tensors and the bad samples of some batches."""
    with simulated():
        loader = Loader(s, rank=0, ranks=1, workers=workers, device=DEVICE, crops=crops)
        assert loader.stream.packed == (crops != "cpu")
        out = []
        for batch, bad in loader.batches(start, stop):
            tensors = [*batch.views, batch.index, batch.label, *([] if batch.boxes is None else [batch.boxes])]
            out.append(([x.cpu() for x in tensors], bad))
        return out


def assert_equal(ours: list[tuple[list[Tensor], Any]], theirs: list[tuple[list[Tensor], Any]]) -> None:
    for (a, bad), (b, expected) in zip(ours, theirs, strict=True):
        assert bad == expected
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("most", [packed.MOST, 0.5, 0])
def test_batches_are_those_of_crops_made_by_readers(folder: Path, most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the end of an epoch and of a phase, with broken samples and boxes, whether images travel, some or none."""
    s = stream(folder, phases=((1, SMALLER),), boxes=True)
    theirs = read(s, "cpu")
    assert any(bad for _, bad in theirs)
    assert [x.shape[-1] for x in theirs[0][0][:2]] == [12, 12]
    assert [x.shape[-1] for x in theirs[-1][0][:2]] == [16, 16]
    monkeypatch.setattr(packed, "MOST", most)
    ours = read(s, "device")
    assert_equal(ours, theirs)
    assert_equal(read(s, "auto", start=7), theirs[7:])


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_loader_processes_send_images(folder: Path) -> None:
    assert_equal(read(stream(folder), "device", 3, stop=4), read(stream(folder), "cpu", 0, stop=4))


def test_a_step_takes_no_more_memory_than_was_said(folder: Path) -> None:
    s = replace(stream(folder), packed=True)
    for part in s.parts(range(4), start=0, stop=8):
        assert part.packed is not None
        assert part.pixels == []
        assert len(part.packed.pixels) <= packed.MOST * 8 * int((VIEWS.size**2).sum())


def test_where_crops_are_made(folder: Path) -> None:
    def made_on(crops: Any, *views: View, device: torch.device = DEVICE) -> bool:
        return packed.packs(crops, views or (View(),), device)

    for device, there in ((DEVICE, True), (torch.device("cpu"), False), (torch.device("mps"), False)):
        assert made_on("auto", device=device) is there
        assert not made_on("cpu", device=device)
    policy = View(), View(randaugment="rand-m9", jitter=0)
    assert not made_on("auto", *policy)
    with pytest.raises(UserError, match=r"^data.crops=device: a view has randaugment, which a CPU applies to crops"):
        made_on("device", *policy)
    with pytest.raises(UserError, match=r"^data.crops=device: .*cpu.* use data.crops=auto$"):
        made_on("device", device=torch.device("cpu"))


STEPS = ("max_steps=10", "evaluate.probe_epochs=0")


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [("device", "cpu"), ("cpu", "device")])
def test_a_run_that_is_killed_continues_with_crops_made_elsewhere_and_ends_with_equal_bits(
    first: str, second: str, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_on_device(small_run("mocov3", shards, tmp_path / "whole", *STEPS, f"data.crops={second}"), monkeypatch)
    begun = small_run("mocov3", shards, tmp_path / "killed", *STEPS, f"data.crops={first}")
    summary, before = run_on_device(begun, monkeypatch, kill_at=9)
    assert summary is None
    continued = small_run("mocov3", shards, tmp_path / "killed", *STEPS, f"data.crops={second}")
    summary, after = run_on_device(continued, monkeypatch)
    assert summary is not None
    assert min(after) == 6  # the checkpoint of step 5
    assert quiet_waits(before) == quiet_waits(after) == {}
    assert_same(weights(tmp_path / "killed"), weights(tmp_path / "whole"))
