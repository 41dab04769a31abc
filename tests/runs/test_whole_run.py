"""What is promised of a run, on one whole run; and commands that are stopped."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from helpers import forked
from helpers.recipes import SMALL
from helpers.runs import FAST, arguments, split, start, wait_for_step

from eagleray.api.pretrain import pretrain
from eagleray.base.errors import UserError
from eagleray.base.files import read_lines
from eagleray.engine import checkpoint, export
from eagleray.runs.tracking import Tracking


@pytest.fixture(scope="module")
def whole(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of 20 steps, whose export another process checks, and that tests only read."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "small.yaml").write_text(SMALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "run_check", forked.check_export)
        pretrain(*split(arguments(folder / "small.yaml", shards, folder / "whole")))
    return folder / "whole"


def test_everything_promised_is_there(whole: Path):
    lines = read_lines(whole / "metrics.jsonl")
    assert [r["step"] for r in lines] == list(range(1, 21))
    wanted = {"step", "epoch", "loss", "lr", "images_per_s", "data_wait", "bad_samples", "grad_norm"}
    assert all(wanted <= r.keys() for r in lines)
    summary = json.loads((whole / "summary.json").read_text())
    wanted = {"knn/top1", "knn/top1_untrained", "linear/top1", "steps", "wall_seconds", "restarts"}
    assert wanted <= summary.keys()
    assert summary["steps"] == 20
    assert summary["restarts"] == 0
    assert [summary[k] for k in ("goodput", "seconds_lost")] == [lines[-1][k] for k in ("goodput", "seconds_lost")]
    for name in ("recipe.yaml", "train.log", "environment.json", "export/backbone.safetensors"):
        assert (whole / name).stat().st_size > 0
    assert len(list((whole / "checkpoints").glob("*.pt"))) == 1


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
    assert "neighbours.png" in names, "which the report shows"
    data = {d.tags[0].value: d.dataset for d in run.inputs.dataset_inputs}
    assert data.keys() == {"training", "test"}
    assert data["training"].name.endswith("shards0/train")
    assert json.loads(data["training"].profile)["images"] == 320
    [model] = run.outputs.model_outputs
    assert client.get_logged_model(model.model_id).status == "READY"


def test_credentials_are_nowhere_in_a_run(small: Path, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    secrets = {"AWS_ACCESS_KEY_ID": "AKIDinthewild", "AWS_SECRET_ACCESS_KEY": "secretinthewild"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    pretrain(*split(arguments(small, shards, tmp_path / "out", "max_steps=2", "evaluate.probe_epochs=0")))
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert {"recipe.yaml", "train.log", "mlflow.db", "environment.json"} <= {p.name for p in files}
    for path in files:
        assert not any(s.encode() in path.read_bytes() for s in secrets.values()), path


@pytest.mark.parametrize(
    ("workers", "readers"),
    [(0, 0), pytest.param(0, 2, marks=pytest.mark.slow), pytest.param(2, 1, marks=pytest.mark.slow)],
    ids=["alone", "readers", "ray"],
)
def test_sigterm_to_a_command_and_all_its_processes_saves_and_stops(
    workers: int, readers: int, small: Path, shards: Path, tmp_path: Path
):
    """As `timeout` sends it, to a command that starts cold."""
    out = tmp_path / "stopped"
    more = ("optim.epochs=4000", *FAST, f"workers={workers}", f"data.workers={readers}")
    process = start(arguments(small, shards, out, *more), group=0, cold=True)
    wait_for_step(out, 3, process)
    os.killpg(process.pid, signal.SIGTERM)
    text = process.communicate(timeout=40 if workers else 200)[0]  # without its servers, Ray waits for 60 s
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
    assert f"continue that run with `eagleray pretrain {whole}`" in str(e.value)


@pytest.mark.slow
def test_output_is_short(small: Path, shards: Path, tmp_path: Path):
    process = start(arguments(small, shards, tmp_path / "out"))
    text = process.communicate(timeout=200)[0]
    assert process.returncode == 0, text
    assert len(text.splitlines()) < 40
    assert "mlflow ui --backend-store-uri sqlite:///" in text.splitlines()[-1]


def test_an_artifact_that_cannot_be_sent_does_not_hold_up_the_end(tmp_path: Path):
    from mlflow import MlflowClient

    from eagleray.runs.mlflow_log import MLflow

    (out := tmp_path / "run").mkdir()
    history = MLflow(out, Tracking(f"sqlite:///{tmp_path / 'mlflow.db'}"), {})
    history.log({"step": 1, "loss": 1.0})
    began = time.monotonic()
    history.close("FINISHED", [tmp_path / "missing"])
    assert time.monotonic() - began < 60
    assert not history.thread.is_alive()
    [run] = MlflowClient(history.uri).search_runs(["1"])
    assert run.info.status == "FINISHED"
