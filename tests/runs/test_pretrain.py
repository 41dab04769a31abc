"""A run from start to end, and through every way of being stopped."""

import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from helpers.killed_runs import assert_same_story
from helpers.pictures import jpeg, write_tar
from helpers.recipes import SMALL
from helpers.runs import FAST, arguments, assert_same, split, start, wait_for_step, weights
from torch import Tensor
from typer.testing import CliRunner

from eagleray.api.pretrain import pretrain
from eagleray.base.errors import Outage, Preempted, UserError
from eagleray.base.files import read_lines
from eagleray.cli import main
from eagleray.data.index import open_index
from eagleray.engine import checkpoint
from eagleray.runs import evaluations
from eagleray.runs.pretrain import describe
from eagleray.runs.rank_run import load_checkpoint
from eagleray.runs.stop_request import StopRequest
from eagleray.runs.train import first_problem
from eagleray.storage.retry import Transient, call_with_retries
from eagleray.storage.store import LocalStore
from eagleray.views import photometric

pytestmark = pytest.mark.usefixtures("untracked_runs")


def test_data_wait_is_waiting_and_not_the_loaders_own_work(
    small: Path, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def slow(*given: Any) -> Tensor:
        time.sleep(0.25)
        return finish(*given)

    finish = photometric.finish
    monkeypatch.setattr(photometric, "finish", slow)  # once a step, as the views have one size
    pretrain(*split(arguments(small, shards, tmp_path / "out", "max_steps=4", "evaluate.probe_epochs=0")))
    for record in read_lines(tmp_path / "out" / "metrics.jsonl"):
        seconds = 32 / record["images_per_s"]  # of the step, at a batch of 32
        assert record["data_wait"] <= 1 - 0.24 / seconds


@pytest.mark.parametrize("recipe", ["small", pytest.param("small_dino", marks=pytest.mark.slow)])
def test_stopping_and_continuing_equals_no_stop(
    recipe: str, shards: Path, tmp_path: Path, request: pytest.FixtureRequest
):
    path = request.getfixturevalue(recipe)
    once, twice = tmp_path / "once", tmp_path / "twice"
    keys = ["evaluate.probe_epochs=0", "monitor.every=3", "optim.epochs=2"]
    pretrain(*split(arguments(path, shards, once, "max_steps=20", *keys)))
    milestones = ("checkpoint.milestones=1", "checkpoint.keep=1")
    for steps in (4, 13, 20):  # within an epoch, and over its end
        pretrain(*split(arguments(path, shards, twice, f"max_steps={steps}", *keys, *milestones)))
    assert checkpoint.manifests(twice / "checkpoints") == ["step-000000020", "step-000000010"]
    assert_same(weights(once), weights(twice))
    a, b = (read_lines(out / "metrics.jsonl") for out in (once, twice))
    timed = {"images_per_s", "data_wait", "knn/top1", "knn/top5"}
    timed |= {"restarts", "steps_repeated", "seconds_lost", "goodput"}
    assert [{k: v for k, v in r.items() if k not in timed} for r in a] == [
        {k: v for k, v in r.items() if k not in timed} for r in b
    ]
    assert {"monitor/knn", "health/backbone_rank", "grad/patch_embed"} <= a[17].keys()
    assert "monitor/knn" not in a[16]


def test_a_run_whose_hours_are_over_says_so_and_goes_on(small: Path, shards: Path, tmp_path: Path):
    args = arguments(small, shards, tmp_path / "out", "max_steps=3", *FAST, "workers=0")
    ended = CliRunner().invoke(main.app, ["pretrain", *args, "--max-hours", "0"])
    assert ended.exit_code == 124, ended.output
    assert "the 0 hours of --max-hours are over: stopping after this step" in ended.output
    run = pretrain(*split(args), max_hours=24)
    assert (run.finished, run.time_over) == (True, False)


@pytest.mark.parametrize("hours", [-1.0, math.nan])
def test_hours_that_are_none_are_refused(hours: float, small: Path, tmp_path: Path):
    with pytest.raises(UserError, match=f"--max-hours {hours:g}: expected a number of hours, 0 or more"):
        pretrain(small, out=tmp_path / "out", max_hours=hours)


def test_a_limit_may_be_as_long_as_one_likes(tmp_path: Path):
    request = StopRequest(str(tmp_path), "id")
    before = set(threading.enumerate())  # a timer of an earlier test may end late
    with request.after(math.inf, print):
        [timer] = [t for t in set(threading.enumerate()) - before if isinstance(t, threading.Timer)]
        timer.join(0.1)
        assert timer.is_alive(), "it has died of a number that is too large"


def test_the_first_line_of_a_run_names_shards_where_images_are_in_some(shards: Path, tmp_path: Path):
    for number in range(2):
        (tmp_path / f"{number}.jpg").write_bytes(jpeg(number))
    tars = [str(path) for path in shards.rglob("*.tar")]
    for urls, packed in (([str(tmp_path)], ""), (tars[:1], " in 1 shard"), (tars, f" in {len(tars)} shards")):
        plan = Mock(index=open_index(urls), steps=3)
        run = Mock(plan=plan, world=Mock(size=1))
        run.method.export.return_value.parameters.return_value = []
        assert f"; {len(plan.index)} images{packed}, 3 steps of " in describe(run)


def test_what_is_wrong_is_said_and_kept(small: Path, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Views without augmentation are the same crop twice."""
    still = "{size: 16, scale: [1.0, 1.0], ratio: [1.0, 1.0], flip: 0.0, jitter: 0.0, gray: 0.0}"
    args = [f"views=[{still}, {still}]", "monitor.every=2", "max_steps=8", "evaluate.probe_epochs=0"]
    pretrain(*split(arguments(small, shards, tmp_path / "out", *args)))
    found = read_lines(tmp_path / "out" / "health.jsonl")
    assert [f["kind"] for f in found if f["kind"] != "spike"][:1] == ["same views"]
    assert "step 2: same views: 100 % of the pixels of views 1 and 2 are equal" in capsys.readouterr().out
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["health"][0].startswith("same views at step 2")
    pretrain(*split(arguments(small, shards, tmp_path / "out", *args, "max_steps=12")))
    again = read_lines(tmp_path / "out" / "health.jsonl")
    assert len([f for f in again if f["kind"] == "same views"]) == 1  # not told again


@pytest.fixture(scope="module")
def plain(untracked_runs: None, shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of 20 steps."""
    folder = tmp_path_factory.mktemp("plain")
    (folder / "small.yaml").write_text(SMALL)
    pretrain(*split(arguments(folder / "small.yaml", shards, folder / "run", *FAST)))
    return folder / "run"


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Make the store stay away from some read of a shard on; until then, it is there."""
    honest, seen = LocalStore.read, [0]
    over = threading.Event()

    def leave(after: int) -> None:
        def read(self: LocalStore, url: str, start: int, length: int, *, patience: float, tag: str = "") -> memoryview:
            seen[0] += 1
            if seen[0] > after:
                raise call_with_retries(url, missing, patience=patience)
            return honest(self, url, start, length)

        def missing() -> Exception:
            if over.is_set():  # a run that was stopped leaves its thread, whose pauses later tests would count
                raise OSError("the test is over")
            raise Transient("SlowDown: reduce your request rate")

        seen[0] = 0
        monkeypatch.setattr(LocalStore, "read", read if after >= 0 else honest)

    yield leave
    over.set()


def test_a_store_that_stays_away_ends_the_run_with_a_checkpoint_and_one_line(
    small: Path, shards: Path, tmp_path: Path, plain: Path, away: Callable[[int], None]
):
    out = tmp_path / "out"
    args = split(arguments(small, shards, out, *FAST, "data.patience=0.005"))
    away(10)  # eight lanes have their first blocks, and few have the next
    with pytest.raises(
        Outage, match=r"^\S+\.tar: SlowDown: reduce your request rate; given up after \d+ attempts in \d+ s$"
    ):
        pretrain(*args)
    state = checkpoint.newest(out / "checkpoints")
    assert state is not None
    assert state["step"] == read_lines(out / "metrics.jsonl")[-1]["step"] > 0
    assert "Traceback" not in (out / "train.log").read_text()
    away(-1)
    pretrain(*args)
    assert_same(weights(out), weights(plain))


def test_a_run_that_waits_for_its_store_hears_that_it_shall_stop(
    small: Path, shards: Path, tmp_path: Path, away: Callable[[int], None]
):
    out = tmp_path / "out"
    away(10)  # eight lanes have their first blocks, and few have the next

    def ask() -> None:
        while not read_lines(out / "metrics.jsonl"):
            time.sleep(0.05)
        (out / ".stop").touch()

    threading.Thread(target=ask).start()
    began = time.monotonic()
    run = pretrain(*split(arguments(small, shards, out, *FAST, "data.patience=5")))
    assert not run.finished
    assert time.monotonic() - began < 250  # and not the five minutes for which it would wait
    state = checkpoint.newest(out / "checkpoints")
    assert state is not None
    assert state["step"] == read_lines(out / "metrics.jsonl")[-1]["step"] > 0


def test_killed_and_started_again_equals_no_kill(small: Path, shards: Path, tmp_path: Path):
    """Also the histories, whose lines lie between checkpoints. tests/chaos kills twenty times."""
    long = ["optim.epochs=40", "max_steps=60", "evaluate.probe_epochs=0", "checkpoint.steps=7", "log_steps=4"]
    long += ["monitor.every=9", "evaluate.every=2", "evaluate.limit=32"]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    process = start(arguments(small, shards, killed, *long))
    wait_for_step(killed, 20, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (killed / "summary.json").exists()
    done = start(arguments(small, shards, killed, *long))
    text = done.communicate(timeout=200)[0]
    assert done.returncode == 0, text
    assert "continuing from step" in text
    pretrain(*split(arguments(small, shards, whole, *long)))
    assert_same(weights(killed), weights(whole))
    assert json.loads((killed / "summary.json").read_text())["restarts"] == 1
    assert_same_story(str(killed), str(whole), tmp_path)
    assert [r["step"] for r in read_lines(killed / "steps.jsonl")] == list(range(1, 61))
    lines = read_lines(killed / "metrics.jsonl")
    assert [r["step"] for r in lines] == list(range(4, 61, 4))
    assert [r["step"] for r in lines if "knn/top1" in r] == [20, 40]
    assert [r["step"] for r in lines if "health/update" in r] == [12, 20, 28, 36, 48, 56]


def test_a_line_whose_evaluation_was_killed_is_written_by_the_next_start(
    small: Path, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    args = [[*arguments(small, shards, tmp_path / n, *FAST), "evaluate.every=1"] for n in ("killed", "whole")]
    with monkeypatch.context() as patch:
        patch.setattr(evaluations, "online", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            pretrain(*split(args[0]))
    assert [r["step"] for r in read_lines(tmp_path / "killed" / "metrics.jsonl")] == list(range(1, 10))
    for one in args:
        pretrain(*split(one))
    assert_same_story(str(tmp_path / "killed"), str(tmp_path / "whole"), tmp_path)
    scores = [r["step"] for r in read_lines(tmp_path / "killed" / "metrics.jsonl") if "knn/top1" in r]
    assert scores == [10]


@pytest.mark.slow
def test_a_checkpoint_whose_optimiser_groups_the_parameters_otherwise_is_refused_in_a_line():
    method: Any = torch.nn.Linear(2, 2)
    together = torch.optim.SGD(method.parameters())
    apart = torch.optim.SGD([{"params": [p]} for p in method.parameters()])
    run: Any = SimpleNamespace(method=method, optimizer=together)
    with pytest.raises(
        UserError, match=r"step 3 groups the parameters otherwise .*start='\{from: OUT, what: method\}'"
    ):
        load_checkpoint(run, {"step": 3, "method": method.state_dict(), "optimizer": apart.state_dict()})


def test_a_damaged_checkpoint_is_passed_over(small: Path, shards: Path, tmp_path: Path):
    out, fresh = tmp_path / "damaged", tmp_path / "fresh"
    few = ["checkpoint.steps=5", "evaluate.probe_epochs=0"]
    pretrain(*split(arguments(small, shards, out, *few, "max_steps=10")))
    newest = max((out / "checkpoints").glob("*.pt"))
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    pretrain(*split(arguments(small, shards, out, *few, "max_steps=12")))
    assert "is damaged" in (out / "train.log").read_text()
    assert "continuing from step 5" in (out / "train.log").read_text()
    pretrain(*split(arguments(small, shards, fresh, *few, "max_steps=12")))
    assert_same(weights(out), weights(fresh))


def test_too_many_bad_samples_stop_the_run(small: Path, shards: Path, tmp_path: Path):
    from eagleray.datasets.shards import Sample, write_shards

    bad = tmp_path / "bad"
    write_shards((Sample(f"{i}", "jpg", b"no image", 0) for i in range(40)), str(bad))
    data = f"data.train=[{shards / 'train'}, {bad}]"
    with pytest.raises(UserError, match=r"of 360 samples are broken, more than data.bad_limit=0.01 allows"):
        pretrain(str(small), [data, f"out={tmp_path / 'out'}"])
    pretrain(str(small), [data, f"out={tmp_path / 'fine'}", "data.bad_limit=0.2", "evaluate.probe_epochs=0"])
    found = read_lines(tmp_path / "fine" / "quarantine.jsonl")
    assert {b["key"] for b in found} == {str(i) for i in range(40)}
    assert len(found) == 40
    assert all(b["reason"] == "cannot identify image file (its .jpg)" for b in found)


def test_no_finite_gradient_changes_nothing_and_stops(
    small_dino: Path, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from eagleray.methods.dino import DINO

    forward = DINO.forward

    def broken(self, batch, at):
        out = forward(self, batch, at)
        if at.step >= 5:
            self.center += float("nan")
            out["loss"] = out["loss"] * float("inf")
        return out

    monkeypatch.setattr(DINO, "forward", broken)
    out = tmp_path / "broken"
    with pytest.raises(UserError, match="no finite gradient in 3 steps in a row"):
        pretrain(*split(arguments(small_dino, shards, out, "checkpoint.steps=1")))
    assert all(torch.isfinite(v).all() for v in weights(out).values())
    assert [r["step"] for r in read_lines(out / "skipped.jsonl")] == [6, 7, 8]
    assert len(read_lines(out / "skipped.jsonl")[0]["keys"]) == 32


def test_unlabelled_images_need_no_evaluation(small: Path, tmp_path: Path):
    from eagleray.cli.demo import pictures
    from eagleray.datasets.shards import write_shards

    plain = ((s.key, s.data) for s in pictures(0, 64))
    from eagleray.datasets.shards import Sample

    write_shards((Sample(key, "png", data) for key, data in plain), str(tmp_path / "plain"))
    summary = pretrain(str(small), [f"data.train={tmp_path / 'plain'}", f"out={tmp_path / 'out'}"]).summary
    assert "knn/top1" not in summary
    assert (tmp_path / "out" / "export" / "backbone.safetensors").exists()


def test_neighbours_are_asked_during_training(small: Path, shards: Path, tmp_path: Path):
    more = ["evaluate.every=1", "evaluate.probe_epochs=0", "log_steps=7", "data.workers=2"]
    pretrain(*split(arguments(small, shards, tmp_path / "out", *more)))
    lines = read_lines(tmp_path / "out" / "metrics.jsonl")
    assert [r["step"] for r in lines] == [7, 10, 14, 20]
    assert [r["step"] for r in lines if "knn/top1" in r] == [10]  # the end has its own evaluation


def test_a_save_that_fails_while_a_machine_is_taken_away_costs_steps_and_not_the_run():
    away, full, own = Outage("s3://b: no answer"), UserError("full"), Preempted("a machine goes")
    assert first_problem([None, away], own) is own
    assert first_problem([away, full], own) is full
    assert first_problem([None, away], None) is away
    assert first_problem([None], None) is None


def test_failed_downloads_are_no_bad_samples(small: Path, tmp_path: Path):
    """Samples without an image are listed, and count neither during a run nor at its end."""
    write_tar(tmp_path / "data" / "0.tar", [*((f"{i:03d}.jpg", jpeg(i)) for i in range(64)), ("x.json", b"{}")])
    out = tmp_path / "out"
    pretrain(str(small), [f"data.train={tmp_path / 'data'}", "data.test=null", f"out={out}", "max_steps=1"])
    assert len(read_lines(out / "quarantine.jsonl")) == 1
    assert read_lines(out / "metrics.jsonl")[-1]["bad_samples"] == 0
    assert json.loads((out / "summary.json").read_text())["bad_samples"] == 0
