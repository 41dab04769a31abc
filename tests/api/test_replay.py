"""A step of a run is taken again: equal to the bit, and what is not as it was is noticed."""

import functools
import random
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import on_ranks
from helpers.recipes import small_recipe
from helpers.runs import start, wait_for_step

import eagleray
from eagleray import config
from eagleray.api import retaken
from eagleray.base.errors import UserError
from eagleray.base.files import append_lines, read_lines
from eagleray.cli import main
from eagleray.cli.demo import pictures
from eagleray.datasets.shards import Sample, write_shards
from eagleray.engine import checkpoint
from eagleray.engine.world import World
from eagleray.methods.dino import DINO
from eagleray.runs import recipe as recipes
from eagleray.runs.plan import resolve_paths
from eagleray.runs.pretrain import pretrain
from eagleray.runs.replay import take
from eagleray.runs.tracking import Tracking

KEYS = ["evaluate.probe_epochs=0", "backbone.drop_path=0.2", "optim.epochs=3", "data.bad_limit=0.2", "log_steps=3"]
KEYS += ["checkpoint.steps=6", "checkpoint.keep=100"]  # at steps that have a line, so that a kill loses no line
BROKEN = 16  # images of the data that do not decode, of 336
STEPS = 24


class Made:
    """A run, its data, and what trains it."""

    def __init__(self, folder: Path) -> None:
        self.recipe, self.data, self.out = folder / "small.yaml", folder / "data", folder / "run"
        self.recipe.write_text(small_recipe("dino"))
        self.write_data(pictures(0, 320))

    def write_data(self, good: Any) -> None:
        """Write shards in which every twentieth image is followed by one that does not decode."""
        shutil.rmtree(self.data, ignore_errors=True)
        samples = []
        for i, sample in enumerate(good):
            samples += [sample, *([Sample(f"broken{i}", "jpg", b"no image", 0)] if i % (320 // BROKEN) == 0 else [])]
        write_shards(samples, str(self.data), size=300_000)

    def arguments(self, steps: int) -> list[str]:
        return [str(self.recipe), f"data.train={self.data}", f"out={self.out}", f"max_steps={steps}", *KEYS]

    def train(self, steps: int) -> None:
        name, *overrides = self.arguments(steps)
        eagleray.pretrain(name, overrides)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A run that was stopped after 6 steps and continued to 12."""
    made = Made(tmp_path_factory.mktemp("replay"))
    made.train(6)
    made.train(12)
    return made


@pytest.fixture
def copy(made: Made, tmp_path: Path) -> Path:
    """A copy of the run's folder, for a test to change."""
    return Path(shutil.copytree(made.out, tmp_path / "run"))


@pytest.fixture
def status(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """What `eagleray replay` ends with."""

    def run(*arguments: object) -> int:
        monkeypatch.setattr("sys.argv", ["eagleray", "replay", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main.main()
        return int(stop.value.code or 0)

    return run


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_steps_are_equal_to_the_bit_and_nothing_of_the_run_is_touched(made: Made):
    before = content(made.out)
    each = read_lines(made.out / "steps.jsonl")
    assert [line["step"] for line in each] == list(range(1, 13))
    for step, begin in (2, 0), (6, 0), (7, 6), (11, 6):
        again = eagleray.replay(made.out, step, from_start=True)
        assert again.exact, str(again)
        assert again.equal
        assert again.begin == begin
        assert {"step": step} | again.recorded == each[step - 1]
        assert again.inexact == again.changed == []
        assert str(again).startswith(f"step {step}: equal to the bit\n")
    assert content(made.out) == before


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_random_steps_of_a_run_with_bad_samples_a_stop_and_a_kill(tmp_path: Path):
    made = Made(tmp_path)
    made.train(6)
    process = start(made.arguments(STEPS))
    wait_for_step(made.out, 15, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    made.train(STEPS)
    assert len([line for line in read_lines(made.out / "starts.jsonl") if "step" in line]) == 3
    assert len(read_lines(made.out / "quarantine.jsonl")) == BROKEN
    for step in random.Random(20).sample(range(1, STEPS + 1), 20):
        again = eagleray.replay(made.out, step, from_start=True)
        assert again.exact, str(again)
        assert again.inexact == []


def test_the_command_prints_both_numbers_and_the_keys_on_request(
    made: Made, copy: Path, status: Callable[..., int], capsys: pytest.CaptureFixture[str]
):
    again = eagleray.replay(made.out, 8)
    capsys.readouterr()
    assert status(made.out, "--step", 8, "--keys") == 0
    assert capsys.readouterr().out.endswith("\n".join([str(again), *again.keys, ""]))
    assert len(again.keys) == 32  # broken images have been replaced by others of the batch
    lines = (copy / "steps.jsonl").read_text()
    (copy / "steps.jsonl").write_text(lines.replace(repr(again.recorded["loss"]), "1.5"))
    assert status(copy, "--step", 8) == 1
    text = capsys.readouterr().out
    assert "step 8: different" in text
    assert f"{'loss':12}{'1.5':24}{again.values['loss']!r}\n" in text
    assert again.keys[0] not in text.splitlines()


def test_a_start_without_its_arithmetic_is_named(copy: Path):
    starts = [{k: v for k, v in s.items() if k in ("step", "ranks", "time")} for s in read_lines(copy / "starts.jsonl")]
    (copy / "starts.jsonl").unlink()
    append_lines(copy / "starts.jsonl", starts)
    again = eagleray.replay(copy, 8)
    assert again.equal
    assert again.inexact == ["the run has not recorded its device and threads"]


def test_a_flipped_weight_is_noticed(copy: Path):
    state = checkpoint.read(copy / "checkpoints" / "step-000000006.pt")
    name = next(n for n in state["method"] if n.endswith("patch_embed.proj.weight"))
    state["method"][name][0, 0, 0, 0] *= -1
    checkpoint.save(copy / "checkpoints", 6, state, keep=1)
    again = eagleray.replay(copy, 7)
    assert not again.equal
    assert 0 < again.difference < 1
    assert str(again).startswith("step 7: different\n")


def test_a_damaged_checkpoint_is_passed_over(copy: Path):
    path = copy / "checkpoints" / "step-000000006.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    again = eagleray.replay(copy, 7, from_start=True)
    assert (again.begin, again.exact) == (0, True)


def test_another_recipe_is_noticed(copy: Path, status: Callable[..., int], capsys: pytest.CaptureFixture[str]):
    recipe = (copy / "recipe.yaml").read_text()
    assert "seed: 0\n" in recipe
    (copy / "recipe.yaml").write_text(recipe.replace("seed: 0\n", "seed: 1\n"))
    assert status(copy, "--step", 8) == 2
    assert "its checkpoints were made with another recipe" in capsys.readouterr().err
    shutil.rmtree(copy / "checkpoints")
    again = eagleray.replay(copy, 2, from_start=True)
    assert not again.equal
    # In another order other images are broken, too.
    assert [line.partition(":")[0] for line in again.changed][:2] == ["recipe", "order"]


@pytest.mark.slow
def test_other_data_is_noticed(tmp_path: Path):
    """One image of the batch is another one, then one is gone, then all are."""
    made = Made(tmp_path)
    made.train(8)
    good = list(pictures(0, 320))
    batch = eagleray.replay(made.out, 8).keys
    made.write_data([replace(s, data=good[0].data) if s.key == batch[0] else s for s in good])
    again = eagleray.replay(made.out, 8)
    assert not again.equal
    assert "data" in [line.partition(":")[0] for line in again.changed]
    made.write_data(good[1:])
    with pytest.raises(UserError, match=r"^data.train: has 335 images, but the run was made with 336$"):
        eagleray.replay(made.out, 8)
    shutil.rmtree(made.data)
    with pytest.raises(UserError, match=str(made.data)):
        eagleray.replay(made.out, 8)


@pytest.mark.slow
def test_a_batch_without_a_finite_gradient_is_kept_and_taken_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    forward = DINO.forward

    def overflow(self: DINO, batch: Any, at: Any) -> dict[str, torch.Tensor]:
        out = forward(self, batch, at)
        return out | {"loss": out["loss"] * float("inf")} if at.step == 4 else out

    made = Made(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(DINO, "forward", overflow)
        made.train(6)
        again = eagleray.replay(made.out, 5, from_start=True)
        assert again.exact, str(again)
        assert "skipped     the gradient was not finite" in str(again)
        [skipped] = read_lines(made.out / "skipped.jsonl")
        assert skipped == {"step": 5, "keys": again.keys}
        append_lines(made.out / "skipped.jsonl", [skipped | {"keys": again.keys[::-1]}])
        assert not eagleray.replay(made.out, 5, from_start=True).equal
    again = eagleray.replay(made.out, 5, from_start=True)
    assert not again.equal
    assert again.difference == float("inf")


def train_rank(out: str, name: str, overrides: list[str]) -> None:
    """Train as one rank, on the CPU and without Ray."""
    recipe = resolve_paths(recipes.load(name, [*overrides, f"out={out}"]))
    Path(out).mkdir(exist_ok=True)
    (Path(out) / "recipe.yaml").write_text(config.dump(recipe))
    pretrain(recipe, World(torch.device("cpu")), tracking=Tracking("none"))


@pytest.mark.slow
def test_several_ranks_are_replayed_on_as_many(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also one that was continued on fewer."""
    name, *overrides = made.arguments(8)
    out = tmp_path / "run"
    on_ranks(2, train_rank, tmp_path, str(out), name, overrides, start="forkserver")
    train_rank(str(out), name, [*overrides, "max_steps=12"])
    on = functools.partial(on_ranks, start="forkserver")
    monkeypatch.setattr(retaken, "on_ranks", lambda task, ranks: on(ranks, take, tmp_path, task, print)[0])
    again = eagleray.replay(out, 7)
    assert again.exact, str(again)
    assert len(again.keys) == 32  # broken images have been replaced by others of the batch
    assert eagleray.replay(out, 10).exact
    shutil.rmtree(out / "checkpoints")
    again = eagleray.replay(out, 10, from_start=True)
    assert again.inexact == ["not all steps since then were taken on the same ranks, device and threads"]


@pytest.mark.parametrize(
    ("step", "change", "line"),
    [
        (13, lambda run: None, "step 13: expected a step from 1 to 12, which the run has recorded"),
        (0, lambda run: None, "step 0: expected a step from 1 to 12, which the run has recorded"),
        (6, lambda run: None, "step 6: {run}/checkpoints keeps no intact checkpoint of an earlier step; --from-start"),
        (8, shutil.rmtree, "{run}: no run there"),
        (8, lambda run: (run / "recipe.yaml").write_text("seed: ["), "{run}/recipe.yaml: "),
    ],
)
def test_wrong_input_is_one_line(
    step: int,
    change: Callable[[Path], Any],
    line: str,
    copy: Path,
    status: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
):
    change(copy)
    assert status(copy, "--step", step) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {line.format(run=copy)}")
    assert error.count("\n") == 1


def test_a_step_between_a_kill_and_the_next_line_is_said_to_have_no_record(copy: Path):
    (copy / "steps.jsonl").unlink()
    lines = read_lines(copy / "metrics.jsonl")
    (copy / "metrics.jsonl").unlink()
    append_lines(copy / "metrics.jsonl", [line for line in lines if line["step"] != 6])
    with pytest.raises(UserError, match=r"^step 5: not recorded, as the run was killed between"):
        eagleray.replay(copy, 5, from_start=True)
