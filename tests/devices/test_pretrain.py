"""Whole runs on the simulated device: every method, killed and continued, and no step waits for the device."""

from pathlib import Path

import pytest
import timm
import torch
from helpers.recipes import METHODS
from helpers.runs import assert_same, weights
from helpers.simulated_device import DEVICE, simulated
from helpers.simulated_runs import quiet_waits, run_on_device, small_run
from safetensors.torch import load_file

from eagleray.api.pretrain import pretrain
from eagleray.base.errors import UserError
from eagleray.base.files import read_lines
from eagleray.engine import world
from eagleray.runs.recipe import Recipe

FAST = ("mocov3",)
CLASSIFIERS = ("drloc", "supervised")
STEPS = ("max_steps=12", "evaluate.every=1")  # ten steps are an epoch


@pytest.mark.parametrize("method", [m if m in FAST else pytest.param(m, marks=pytest.mark.slow) for m in METHODS])
def test_a_whole_run_is_killed_continues_and_never_waits_in_a_step(
    method: str, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    r = small_run(method, shards, tmp_path / "out", *STEPS)
    summary, before = run_on_device(r, monkeypatch, kill_at=9)
    assert summary is None
    summary, after = run_on_device(r, monkeypatch, export=method not in FAST[1:])
    assert summary is not None
    assert summary["steps"] == max(after) == 12
    assert min(after) == 6  # the checkpoint of step 5
    assert quiet_waits(before) == quiet_waits(after) == {}
    assert any(waits for waits in after.values())  # those that log

    lines = read_lines(tmp_path / "out" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [4, 8, 10, 12]
    score = "classifier/top1" if method in CLASSIFIERS else "knn/top1"
    assert score in summary
    assert score in lines[2]  # at the end of the epoch
    assert "health/backbone_std" in lines[1]
    assert all(x.device.type == "cpu" for x in weights(tmp_path / "out").values())
    if method not in FAST[1:]:
        assert_timm_loads(r)


def assert_timm_loads(r: Recipe) -> None:
    """Check that the exported file of a run holds all tensors of the timm model that its recipe names."""
    tensors = load_file(Path(r.out) / "export" / "backbone.safetensors")
    model = timm.create_model(r.backbone.name, num_classes=0, **r.backbone.options)
    model.load_state_dict(tensors)
    assert all(torch.equal(x, tensors[name]) for name, x in model.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("method", FAST[1:])
def test_a_short_run_exports_what_timm_loads(
    method: str, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    r = small_run(method, shards, tmp_path / "out", "max_steps=1", "evaluate.probe_epochs=0")
    run_on_device(r, monkeypatch, export=True)
    assert_timm_loads(r)


@pytest.mark.slow
def test_a_continued_run_equals_one_that_was_not_killed(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = ("max_steps=7", "evaluate.probe_epochs=0")
    run_on_device(small_run("mocov3", shards, tmp_path / "whole", *steps), monkeypatch)
    r = small_run("mocov3", shards, tmp_path / "killed", *steps)
    run_on_device(r, monkeypatch, kill_at=7)
    run_on_device(r, monkeypatch)
    assert_same(weights(tmp_path / "killed"), weights(tmp_path / "whole"))


def test_fine_tuning_starts_on_the_device_from_the_weights_of_a_file(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rare = ("max_steps=1", "evaluate.probe_epochs=0")
    run_on_device(small_run("simsiam", shards, tmp_path / "first", *rare), monkeypatch)
    first = tmp_path / "first"
    r = small_run("supervised", shards, tmp_path / "second", "max_steps=8", f"backbone.weights={first}")
    summary, waits_of = run_on_device(r, monkeypatch)
    assert summary is not None
    assert "classifier/top1" in summary
    assert quiet_waits(waits_of) == {}


def test_gpus_are_not_replaced_by_a_cpu_in_silence(
    small: Path, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    out = tmp_path / "out"
    for workers in (0, 2):
        with pytest.raises(UserError, match=r"^gpus=true: .* leave gpus out or give gpus=false .*$") as error:
            pretrain(str(small), [f"data.train={shards / 'train'}", f"out={out}", "gpus=true", f"workers={workers}"])
        assert "\n" not in str(error.value)
    assert not (out / "recipe.yaml").exists()
    assert world.local(gpus=False).device == torch.device("cpu")
    with simulated():
        assert world.local(gpus=True).device == world.local().device == DEVICE
        assert world.local(gpus=False).device == torch.device("cpu")
