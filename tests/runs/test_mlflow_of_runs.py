"""What MLflow and the other sinks show of runs that were stopped or killed."""

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.processes import wait_for
from helpers.recipes import small_recipe
from helpers.runs import arguments, split, start, wait_for_step
from helpers.sweeps import write

from eagleray import config
from eagleray.api.pretrain import pretrain, send_report
from eagleray.base import files
from eagleray.base.errors import UserError
from eagleray.base.files import read_lines
from eagleray.reports.write import mend_sweep, report
from eagleray.runs import layout, mlflow_run, sinks
from eagleray.runs import recipe as recipes
from eagleray.runs.sinks import Sinks
from eagleray.runs.tracking import Tracking
from eagleray.sweeps import ray_tune
from eagleray.sweeps.run import tune
from eagleray.sweeps.sweep import load

LONG = ("optim.epochs=4000", "evaluate.probe_epochs=0", "checkpoint.steps=5")


def run_there(folder: Path) -> tuple[Any, Any]:
    """MLflow's client and its only run."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    [run] = client.search_runs([client.get_experiment_by_name("eagleray").experiment_id])
    return client, run


def begun(small: Path, shards: Path, out: Path) -> Any:
    """A run that MLflow knows of and that has a checkpoint."""
    process = start(arguments(small, shards, out, *LONG))
    wait_for_step(out, 8, process)
    wait_for(lambda: (out / "mlflow.json").exists() and "run_id" in (out / "mlflow.json").read_text())
    return process


@pytest.mark.slow
def test_a_killed_run_is_ended_by_its_report_and_a_stopped_one_leaves_its_files(
    small: Path, shards: Path, tmp_path: Path
):
    process = begun(small, shards, out := tmp_path / "runs" / "a")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert run_there(tmp_path / "runs")[1].info.status == "RUNNING"
    report(out)
    assert run_there(tmp_path / "runs")[1].info.status == "KILLED"
    process = begun(small, shards, out)
    wait_for(lambda: run_there(tmp_path / "runs")[1].info.status == "RUNNING")
    process.send_signal(signal.SIGTERM)
    text = process.communicate(timeout=200)[0]
    client, run = run_there(tmp_path / "runs")
    assert run.info.status == "KILLED", text
    names = {f.path for f in client.list_artifacts(run.info.run_id)}
    assert {"recipe.yaml", "checkpoints.json", "report.html", "report"} <= names, text
    places = json.loads((out / "checkpoints.json").read_text())
    assert all(Path(place["url"]).stat().st_size == place["size"] for place in places)
    assert "step-" in places[-1]["url"]


def test_the_report_of_a_killed_sweep_ends_its_trials_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """But not one that a process works on."""
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    (tmp_path / "mlflow.db").touch()
    folder = tmp_path / "sweep"
    for name in (".", "trials/000", "trials/001", "trials/002"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        ended = {"ended": "FINISHED"} if name == "trials/000" else {}
        (folder / name / "mlflow.json").write_text(json.dumps({uri: {"run_id": "1"} | ended}))
    asked = []
    monkeypatch.setattr(mlflow_run, "mend", lambda tracking, note, status: asked.append((note, status)))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with files.lock_folder(folder / "trials" / "002", layout.OWNER):
        mend_sweep(str(folder), folder)
    assert asked == [(folder / n / "mlflow.json", "KILLED") for n in (".", "trials/000", "trials/001")]


@pytest.mark.slow
def test_a_sweep_that_ray_refuses_has_failed_in_mlflow(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object, **__: object) -> None:
        assert run_there(tmp_path)[1].info.status == "RUNNING"
        raise UserError("--max-concurrent 2: cannot be used")

    monkeypatch.setattr(ray_tune, "launch", refuse)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "mocov3.yaml").write_text(small_recipe("mocov3"))
    swept = write(tmp_path / "sweep.yaml", alternatives={"mocov3": {"recipe": "mocov3.yaml"}})
    keys = [f"data.train={shards / 'train'}", f"data.test={shards / 'test'}", f"out={tmp_path / 'sweep'}"]
    for _ in range(2):
        with pytest.raises(UserError, match="cannot be used"):
            tune(load(str(swept), keys), most=2, resume=False)
        assert run_there(tmp_path)[1].info.status == "FAILED"


@pytest.mark.slow
def test_tensorboard_and_wandb_get_the_numbers_of_every_start(
    small: Path, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setitem(sys.modules, "mlflow", None)  # which takes seconds
    out = tmp_path / "out"
    keys = ["evaluate.probe_epochs=0", "track.also=[tensorboard, wandb]"]
    for steps in (3, 5):
        pretrain(*split(arguments(small, shards, out, *keys, f"max_steps={steps}")))
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    lines = read_lines(out / "metrics.jsonl")
    shown = {e.step: e.value for e in events.Scalars("loss")}
    assert shown == {r["step"]: pytest.approx(r["loss"], rel=1e-6) for r in lines}
    assert events.Scalars("knn/top1")
    [first, second] = sorted((out / "wandb").glob("offline-run-*/*.wandb"))
    assert first.stat().st_size > 1000
    assert first.name == second.name  # one run there


class Failing:
    """A sink whose disk is full."""

    def __init__(self, *_: object) -> None:
        self.asked = 0

    def log(self, step: int, numbers: dict[str, float]) -> None:
        self.asked += 1
        raise OSError(28, "No space left on device")

    def close(self) -> None:
        raise AssertionError("it is left out")


def test_a_sink_that_fails_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setitem(sinks.SINKS, "wandb", Failing)
    opened = Sinks(["wandb"], tmp_path, 0, {})
    sink = opened.open["wandb"]
    for step in (1, 2):
        opened.log({"step": step, "loss": 1.0})
    opened.close()
    assert sink.asked == 1
    assert caplog.messages == ["track.also: wandb gets no more numbers: [Errno 28] No space left on device"]


def test_a_sink_whose_package_is_missing_is_an_error_of_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("wandb", "tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(UserError, match=f"track.also: needs the package {name}, which is not installed"):
            Sinks([name], tmp_path, 0, {})


def test_a_run_has_its_report_while_the_server_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    written: list[list[str]] = []

    def write(runs: list[str]) -> list[str]:
        written.append(runs)
        return [str(tmp_path / "report.html")]

    monkeypatch.setattr("eagleray.reports.write.report", write)
    monkeypatch.setattr("eagleray.api.pretrain.update", lambda *_: pytest.fail("the server is away"))
    send_report(str(tmp_path), tmp_path, Tracking("http://127.0.0.1:1"))
    assert written == [[str(tmp_path)]]


def test_tracking_changes_no_identity():
    name = "dino_vits16_in1k_ep100"
    plain = recipes.load(name)
    named = recipes.load(name, ["track.register=mine", "track.also=[tensorboard]"])
    assert recipes.digest(named) == recipes.digest(plain)
    assert config.to_plain(named)["track"] == {"register": "mine", "also": ["tensorboard"]}
    with pytest.raises(UserError, match=r"track\.register"):
        recipes.load(name, ["track.register=a/b"])
