"""A run from start to end, and through every way of being stopped."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs import FAST, arguments, assert_same, split, start, wait_for_step, weights
from torch import Tensor

from eagleray.api.pretrain import pretrain
from eagleray.base.errors import Outage, Preempted, UserError
from eagleray.base.files import read_lines
from eagleray.engine import checkpoint
from eagleray.runs.pretrain import first_problem, load_checkpoint
from eagleray.runs.rank_run import Stateful
from eagleray.runs.tracking import Tracking
from eagleray.storage.retry import Transient, call_with_retries
from eagleray.storage.store import LocalStore
from eagleray.views import photometric


@pytest.fixture
def whole(small: Path, shards: Path, tmp_path: Path) -> Path:
    """An uninterrupted run of 20 steps."""
    out = tmp_path / "whole"
    pretrain(*split(arguments(small, shards, out)))
    return out


@pytest.mark.usefixtures("new_process")
def test_everything_promised_is_there(whole: Path, capsys: pytest.CaptureFixture[str]):
    lines = read_lines(whole / "metrics.jsonl")
    assert [r["step"] for r in lines] == list(range(1, 21))
    wanted = {"step", "epoch", "loss", "lr", "images_per_s", "data_wait", "bad_samples", "grad_norm"}
    assert all(wanted <= r.keys() for r in lines)
    summary = json.loads((whole / "summary.json").read_text())
    wanted = {"knn/top1", "knn/top1_untrained", "linear/top1", "steps", "wall_seconds", "restarts"}
    assert wanted <= summary.keys()
    assert summary["steps"] == 20
    assert summary["restarts"] == 0
    for name in ("recipe.yaml", "train.log", "environment.json", "export/backbone.safetensors"):
        assert (whole / name).stat().st_size > 0
    assert len(list((whole / "checkpoints").glob("*.pt"))) == 1


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


def test_history_is_in_mlflow(whole: Path):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{whole.parent / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("eagleray")
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"
    [run] = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.tags["mlflow.source.name"] == "eagleray"
    assert run.data.params["optim.batch"] == "32"
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [m.step for m in history] == list(range(1, 21))
    logged = {m.step: m.value for m in history}
    for record in read_lines(whole / "metrics.jsonl"):
        assert logged[record["step"]] == pytest.approx(record["loss"])
    assert "knn/top1" in run.data.metrics
    names = {f.path for f in client.list_artifacts(run.info.run_id)}
    assert {"recipe.yaml", "summary.json", "health.png", "checkpoints.json", "report.html", "report"} <= names
    data = {d.tags[0].value: d.dataset for d in run.inputs.dataset_inputs}
    assert data.keys() == {"training", "test"}
    assert data["training"].name.endswith("shards0/train")
    assert json.loads(data["training"].profile)["images"] == 320
    [model] = run.outputs.model_outputs
    assert client.get_logged_model(model.model_id).status == "READY"


@pytest.mark.parametrize("recipe", ["small", pytest.param("small_dino", marks=pytest.mark.slow)])
def test_stopping_and_continuing_equals_no_stop(
    recipe: str, shards: Path, tmp_path: Path, request: pytest.FixtureRequest
):
    path = request.getfixturevalue(recipe)
    once, twice = tmp_path / "once", tmp_path / "twice"
    keys = ["evaluate.probe_epochs=0", "monitor.every=3", "optim.epochs=2"]
    pretrain(*split(arguments(path, shards, once, "max_steps=20", *keys)))
    for steps in (4, 13, 20):  # within an epoch, and over its end
        pretrain(*split(arguments(path, shards, twice, f"max_steps={steps}", *keys)))
    assert_same(weights(once), weights(twice))
    a, b = (read_lines(out / "metrics.jsonl") for out in (once, twice))
    timed = {"images_per_s", "data_wait", "knn/top1", "knn/top5"}
    timed |= {"restarts", "steps_repeated", "seconds_lost", "goodput"}
    assert [{k: v for k, v in r.items() if k not in timed} for r in a] == [
        {k: v for k, v in r.items() if k not in timed} for r in b
    ]
    assert {"monitor/knn", "health/backbone_rank", "grad/patch_embed"} <= a[17].keys()
    assert "monitor/knn" not in a[16]


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


def test_credentials_are_nowhere_in_a_run(small: Path, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    secrets = {"AWS_ACCESS_KEY_ID": "AKIDinthewild", "AWS_SECRET_ACCESS_KEY": "secretinthewild"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    pretrain(*split(arguments(small, shards, tmp_path / "out", "max_steps=2", "evaluate.probe_epochs=0")))
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert {"recipe.yaml", "train.log", "mlflow.db", "environment.json"} <= {p.name for p in files}
    for path in files:
        assert not any(s.encode() in path.read_bytes() for s in secrets.values()), path


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
    small: Path, shards: Path, tmp_path: Path, whole: Path, away: Callable[[int], None]
):
    out = tmp_path / "out"
    args = split(arguments(small, shards, out, "data.patience=0.005"))
    away(10)  # eight lanes have their first blocks, and few have the next
    with pytest.raises(
        Outage, match=r"^\S+\.tar: SlowDown: reduce your request rate; given up after \d+ attempts in 0 s$"
    ):
        pretrain(*args)
    state = checkpoint.newest(out / "checkpoints")
    assert state is not None
    assert state["step"] == read_lines(out / "metrics.jsonl")[-1]["step"] > 0
    assert "Traceback" not in (out / "train.log").read_text()
    away(-1)
    pretrain(*args)
    assert_same(weights(out), weights(whole))


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
    run = pretrain(*split(arguments(small, shards, out, "data.patience=5")))
    assert not run.finished
    assert time.monotonic() - began < 60
    state = checkpoint.newest(out / "checkpoints")
    assert state is not None
    assert state["step"] == read_lines(out / "metrics.jsonl")[-1]["step"] > 0


def test_killed_and_started_again_equals_no_kill(small: Path, shards: Path, tmp_path: Path):
    long = ["optim.epochs=40", "max_steps=60", "evaluate.probe_epochs=0", "checkpoint.steps=7"]
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
    steps = [r["step"] for r in read_lines(killed / "metrics.jsonl")]
    assert steps == list(range(1, 61))


@pytest.mark.parametrize(
    ("workers", "readers"),
    [(0, 0), pytest.param(0, 2, marks=pytest.mark.slow), pytest.param(2, 1, marks=pytest.mark.slow)],
    ids=["alone", "readers", "ray"],
)
def test_sigterm_to_a_command_and_all_its_processes_saves_and_stops(
    workers: int, readers: int, small: Path, shards: Path, tmp_path: Path
):
    """As `timeout` sends it."""
    out = tmp_path / "stopped"
    more = ("optim.epochs=4000", *FAST, f"workers={workers}", f"data.workers={readers}")
    process = start(arguments(small, shards, out, *more), group=0)
    wait_for_step(out, 3, process)
    os.killpg(process.pid, signal.SIGTERM)
    text = process.communicate(timeout=40)[0]  # without its servers, Ray waits for 60 s
    assert process.returncode == 1, text
    last = read_lines(out / "metrics.jsonl")[-1]["step"]
    state = checkpoint.newest(out / "checkpoints")
    assert state is not None
    assert state["step"] == last
    assert f"stopped at step {last}" in text


def test_a_finished_run_is_left_alone(whole: Path, small: Path, shards: Path, capsys: pytest.CaptureFixture[str]):
    before = (whole / "metrics.jsonl").read_bytes(), (whole / "starts.jsonl").read_bytes()
    pretrain(*split(arguments(small, shards, whole)))
    assert "done already" in capsys.readouterr().out
    assert before == ((whole / "metrics.jsonl").read_bytes(), (whole / "starts.jsonl").read_bytes())


def test_another_recipe_is_refused_with_both_ways_out(whole: Path, small: Path, shards: Path):
    with pytest.raises(UserError) as e:
        pretrain(*split(arguments(small, shards, whole, "method.temperature=0.5")))
    assert "method.temperature is 0.2 there and 0.5 here" in str(e.value)
    assert "another out=" in str(e.value)
    assert f"eagleray pretrain {whole / 'recipe.yaml'}" in str(e.value)


@pytest.mark.slow
def test_a_checkpoint_whose_optimiser_groups_the_parameters_otherwise_is_refused_in_a_line():
    method: Any = torch.nn.Linear(2, 2)
    together = torch.optim.SGD(method.parameters())
    apart = torch.optim.SGD([{"params": [p]} for p in method.parameters()])
    stateful = Stateful(method, together, *(torch.nn.Module() for _ in range(4)))  # type: ignore[arg-type]
    with pytest.raises(
        UserError, match=r"step 3 groups the parameters otherwise .*start='\{from: OUT, what: method\}'"
    ):
        load_checkpoint({"step": 3, "method": method.state_dict(), "optimizer": apart.state_dict()}, stateful)


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
    assert all(b["reason"] == "cannot identify image file" for b in found)


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


@pytest.mark.slow
def test_output_is_short(small: Path, shards: Path, tmp_path: Path):
    process = start(arguments(small, shards, tmp_path / "out"))
    text = process.communicate(timeout=200)[0]
    assert process.returncode == 0, text
    assert len(text.splitlines()) < 40
    assert "mlflow ui --backend-store-uri sqlite:///" in text.splitlines()[-1]


def test_neighbours_are_asked_during_training(small: Path, shards: Path, tmp_path: Path):
    more = ["evaluate.every=1", "evaluate.probe_epochs=0", "log_steps=7", "data.workers=2"]
    pretrain(*split(arguments(small, shards, tmp_path / "out", *more)))
    lines = read_lines(tmp_path / "out" / "metrics.jsonl")
    assert [r["step"] for r in lines] == [7, 10, 14, 20]
    assert [r["step"] for r in lines if "knn/top1" in r] == [10]  # the end has its own evaluation


def test_an_artifact_that_cannot_be_sent_does_not_hold_up_the_end(tmp_path: Path):
    from mlflow import MlflowClient

    from eagleray.runs.mlflow_thread import MLflow

    (out := tmp_path / "run").mkdir()
    history = MLflow(out, Tracking(f"sqlite:///{tmp_path / 'mlflow.db'}"), {})
    history.log({"step": 1, "loss": 1.0})
    began = time.monotonic()
    history.close("FINISHED", [tmp_path / "missing"])
    assert time.monotonic() - began < 60
    assert not history.thread.is_alive()
    [run] = MlflowClient(history.uri).search_runs(["1"])
    assert run.info.status == "FINISHED"


def test_a_save_that_fails_while_a_machine_is_taken_away_costs_steps_and_not_the_run():
    away, full, own = Outage("s3://b: no answer"), UserError("full"), Preempted("a machine goes")
    assert first_problem([None, away], own) is own
    assert first_problem([away, full], own) is full
    assert first_problem([None, away], None) is away
    assert first_problem([None], None) is None
