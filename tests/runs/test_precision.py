"""A whole run in another format than float32: its steps, checkpoints, continuation and evaluations."""

import re
from pathlib import Path

import pytest
import torch
from helpers.runs import arguments, assert_same, split, weights

from eagleray.api.pretrain import pretrain
from eagleray.base.errors import UserError
from eagleray.base.files import read_lines
from eagleray.cluster import ray_train
from eagleray.config.types import Format
from eagleray.engine import checkpoint
from eagleray.engine.precision import Precision
from eagleray.runs import recipe as recipes

KEYS = ("evaluate.probe_epochs=0", "evaluate.limit=40", "optim.epochs=2")


@pytest.fixture
def float16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train in float16 on this CPU, which is refused to users."""

    def of(cls: type[Precision], choice: Format, device: torch.device) -> Precision:
        return cls(torch.float16, device)

    monkeypatch.setattr(Precision, "of", classmethod(of))


def test_float16_on_a_cpu_is_one_line_before_the_data_is_opened(
    small: Path, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagleray.runs.begin.make_plan", None)
    with pytest.raises(UserError, match=re.escape("precision=fp16: a CPU trains in fp32")):
        pretrain(*split(arguments(small, shards, tmp_path / "out", "precision=fp16")))
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_float16_on_workers_without_a_gpu_is_one_line(small: Path, tmp_path: Path) -> None:
    class Ray:
        """A cluster of one machine without a GPU."""

        def nodes(self) -> list[dict[str, object]]:
            return [{"Alive": True, "Resources": {"CPU": 4}}]

    recipe = recipes.load(str(small), ["precision=fp16", "workers=2", "data.train=none", f"out={tmp_path}"])
    with pytest.raises(UserError, match=re.escape("precision=fp16: a CPU trains in fp32")):
        ray_train.fit(Ray(), recipe, tracking=None, command="a")  # type: ignore[arg-type]


@pytest.mark.slow
def test_bfloat16_continues_with_equal_bits(small: Path, shards: Path, tmp_path: Path) -> None:
    once, twice, plain = (tmp_path / name for name in ("once", "twice", "plain"))
    pretrain(*split(arguments(small, shards, once, "max_steps=6", "precision=bf16", *KEYS)))
    for steps in (3, 6):
        pretrain(*split(arguments(small, shards, twice, f"max_steps={steps}", "precision=bf16", *KEYS)))
    assert_same(weights(once), weights(twice))
    pretrain(*split(arguments(small, shards, plain, "max_steps=6", *KEYS)))
    bf16, fp32 = (read_lines(out / "metrics.jsonl") for out in (once, plain))
    assert bf16[0]["loss"] != fp32[0]["loss"]
    assert bf16[0]["loss"] == pytest.approx(fp32[0]["loss"], rel=0.05)


@pytest.mark.slow
def test_a_run_may_change_its_precision(small: Path, shards: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    pretrain(*split(arguments(small, shards, out, "max_steps=2", *KEYS)))
    pretrain(*split(arguments(small, shards, out, "max_steps=4", "precision=bf16", "deterministic=true", *KEYS)))
    assert [r["step"] for r in read_lines(out / "metrics.jsonl")] == [1, 2, 3, 4]


@pytest.mark.usefixtures("float16")
@pytest.mark.slow
def test_the_scale_is_in_the_checkpoint(
    small: Path, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagleray.engine.precision.START", 16.0)
    monkeypatch.setattr("eagleray.engine.precision.INTERVAL", 4)
    once, twice = tmp_path / "once", tmp_path / "twice"
    pretrain(*split(arguments(small, shards, once, "max_steps=6", *KEYS)))
    pretrain(*split(arguments(small, shards, twice, "max_steps=3", *KEYS)))
    state = checkpoint.newest(twice / "checkpoints")
    assert state is not None
    assert int(state["precision"]["good_steps"]) == 3
    pretrain(*split(arguments(small, shards, twice, "max_steps=6", *KEYS)))
    assert_same(weights(once), weights(twice))
    a, b = (checkpoint.newest(out / "checkpoints") for out in (once, twice))
    assert a is not None
    assert b is not None
    assert float(a["precision"]["loss_scale"]) == 32  # doubled after the fourth step, which came after the stop
    assert a["precision"] == b["precision"]
    assert all("loss_scale" in r for r in read_lines(twice / "metrics.jsonl"))


@pytest.mark.usefixtures("float16")
def test_overflows_end_no_run(small: Path, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale is halved until the gradients fit, however many steps in a row this takes."""
    monkeypatch.setattr("eagleray.engine.precision.START", 2.0**18)
    out = tmp_path / "out"
    pretrain(*split(arguments(small, shards, out, "max_steps=12", *KEYS)))
    lines = read_lines(out / "metrics.jsonl")
    assert sum(r["skipped_steps"] for r in lines) > 3
    assert lines[-1]["skipped_steps"] == 0
    assert not (out / "skipped.jsonl").exists()
    assert not [r for r in read_lines(out / "health.jsonl") if r["kind"] == "non-finite"]
