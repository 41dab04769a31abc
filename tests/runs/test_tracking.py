"""What MLflow is told: every step once, whatever happens to its server or to the run, and nobody waits for it."""

import json
import logging
import random
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.processes import free_port, wait_for
from helpers.tracking import BLOCKED, logged, record
from mlflow.entities import Metric
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST

from eagleray.base.errors import Outage, UserError, hide_secrets
from eagleray.base.files import JsonLines
from eagleray.runs import mlflow_thread
from eagleray.runs.mlflow_requests import finish, mend, parent_run, send_missing
from eagleray.runs.mlflow_run import MLflowRun
from eagleray.runs.mlflow_thread import MLflow
from eagleray.runs.tracking import DataInput, Tracking, tracking_of

# A server in memory that fails when it is told to, before or after it has done what it was asked.


class Memory:
    """What survives of an MLflow server."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, Any]] = {}
        self.failing = lambda: False
        self.clients = 0

    def client(self, uri: str) -> "Client":
        self.clients += 1
        return Client(self)

    def count(self) -> dict[tuple[str, int], int]:
        [run] = self.runs.values()
        steps = [(m.key, m.step) for m in run["metrics"]]
        return {s: steps.count(s) for s in steps}


class Client:
    """The few calls of MlflowClient that are made."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    def __getattr__(self, name: str) -> Any:
        memory, call = self.memory, object.__getattribute__(self, f"_{name}")

        def failing(*args: Any, **more: Any) -> Any:
            if memory.failing():
                raise MlflowException("refused")
            reply = call(memory, *args, **more)
            if memory.failing():
                raise MlflowException("no reply")
            return reply

        return failing

    def _get_experiment_by_name(self, memory: Memory, name: str) -> Any:
        return type("E", (), {"experiment_id": "1"})

    def _create_run(self, memory: Memory, experiment: str, run_name: str, tags: dict[str, str]) -> Any:
        id = uuid.uuid4().hex
        memory.runs[id] = {"name": run_name, "tags": tags, "metrics": [], "params": {}, "status": "RUNNING"}
        return self._get_run(memory, id)

    def _search_runs(self, memory: Memory, experiments: list[str], query: str) -> list[Any]:
        key = query.split("'")[1]
        return [self._get_run(memory, i) for i, r in memory.runs.items() if r["tags"]["eagleray.key"] == key]

    def _get_run(self, memory: Memory, id: str) -> Any:
        if id not in memory.runs:
            raise MlflowException(f"Run with id={id} not found", RESOURCE_DOES_NOT_EXIST)
        run = memory.runs[id]
        last = {m.key: m for m in sorted(run["metrics"], key=lambda m: m.step)}
        data = {"params": run["params"], "_metric_objs": list(last.values()), "metrics": {}}
        info = {"run_id": id, "lifecycle_stage": "active", "status": run["status"]}
        return type("R", (), {"info": type("I", (), info), "data": type("D", (), data)})

    def _log_batch(self, memory: Memory, id: str, metrics: tuple[Metric, ...] = (), params: Any = ()) -> None:
        assert len(metrics) <= 1000
        assert len(params) <= 100
        known = {(m.key, m.timestamp, m.step, m.value) for m in memory.runs[id]["metrics"]}
        new = [m for m in metrics if (m.key, m.timestamp, m.step, m.value) not in known]  # as the real one
        memory.runs[id]["metrics"] += new
        memory.runs[id]["params"] |= {p.key: p.value for p in params}

    def _update_run(self, memory: Memory, id: str, status: str) -> None:
        memory.runs[id]["status"] = status

    _set_terminated = _update_run

    def _log_inputs(self, memory: Memory, id: str, datasets: list[Any]) -> None:
        memory.runs[id].setdefault("inputs", []).append(datasets)

    def _log_artifact(self, memory: Memory, id: str, path: str) -> None:
        memory.runs[id].setdefault("files", []).append(Path(path).name)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    memory = Memory()
    monkeypatch.setattr("mlflow.MlflowClient", memory.client)
    for name, value in {"GATHER": 0.01, "PAUSE": 0.02, "PATIENCE": 1.0, "BRIEF": 0.5, "LOAD": 0.05}.items():
        monkeypatch.setattr(mlflow_thread, name, value)
    return memory


@pytest.mark.parametrize("seed", range(6))
def test_every_step_once_through_any_sequence_of_failures(
    memory: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
):
    """The server fails one call in three, there is little memory, and the run is killed and goes back to a
    checkpoint."""
    monkeypatch.setattr(mlflow_thread, "BUFFER", 5)
    monkeypatch.setattr(mlflow_thread, "PATIENCE", 60.0)
    chance = random.Random(seed)
    memory.failing = lambda: chance.random() < 0.18
    step, begun = 0, 0
    while step < 60:
        lines, begun = JsonLines(tmp_path / "metrics.jsonl", step=step), step
        history = MLflow(tmp_path, Tracking("http://server"), {f"key{i}": i for i in range(150)})
        for _ in range(chance.randint(1, 30)):
            step = min(step + 1, 60)
            if step <= 60:
                lines.log(record(step))
                history.log(record(step))
            time.sleep(chance.choice([0, 0, 0.03]))
            if step == 60:
                break
        if step < 60:  # killed: the thread stops in the middle of what it does, nothing is closed
            history.given_up.set()
            history.thread.join()
            step = chance.randint(begun, step)
    memory.failing = lambda: False
    history.log({"step": 61, "wall_seconds": 1.0, "recipe": "no number"})
    history.close("FINISHED", [])
    assert not history.thread.is_alive()
    [run] = memory.runs.values()
    assert run["status"] == "FINISHED"
    assert run["params"] == {f"key{i}": str(i) for i in range(150)}
    expected = {(k, s) for s in range(1, 61) for k in record(s) if k != "step"} | {("wall_seconds", 61)}
    count = {k: n for k, n in memory.count().items() if not k[0].startswith("system/")}
    assert count == dict.fromkeys(expected, 1)


@pytest.mark.parametrize("away", [3, 20])
def test_nothing_is_missed_in_the_middle(memory: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, away: int):
    """As much as memory holds, and more."""
    monkeypatch.setattr(mlflow_thread, "BUFFER", 5)
    monkeypatch.setattr(mlflow_thread, "PATIENCE", 60.0)
    lines = JsonLines(tmp_path / "metrics.jsonl", step=0)
    history = MLflow(tmp_path, Tracking("http://server"), {})
    logged(history, range(1, 3), 0, lines)
    wait_for(lambda: memory.runs and ("loss", 2) in memory.count())
    memory.failing = lambda: True
    logged(history, range(3, 3 + away), 0.02, lines)
    time.sleep(0.3)
    memory.failing = lambda: False
    logged(history, range(3 + away, 6 + away), 0, lines)
    history.close("FINISHED", [])
    assert {s: n for (k, s), n in memory.count().items() if k == "loss"} == dict.fromkeys(range(1, 6 + away), 1)


def test_an_unreachable_server_makes_no_second_run(memory: Memory, tmp_path: Path):
    for begin in (0, 10, 20):
        lines = JsonLines(tmp_path / "metrics.jsonl", step=begin)
        memory.failing = lambda at=begin: at == 10  # away for the whole of the second start
        history = MLflow(tmp_path, Tracking("http://server"), {})
        for step in range(begin + 1, begin + 11):
            lines.log(record(step))
            history.log(record(step))
        history.close("KILLED", [])
    [run] = memory.runs.values()
    assert [m.step for m in run["metrics"] if m.key == "loss"] == list(range(1, 31))


def test_a_run_that_was_deleted_there_is_told_again_in_another(memory: Memory, tmp_path: Path):
    for begin in (0, 2):
        lines = JsonLines(tmp_path / "metrics.jsonl", step=begin)
        history = MLflow(tmp_path, Tracking("http://server"), {})
        for step in (begin + 1, begin + 2):
            lines.log(record(step))
            history.log(record(step))
        history.close("KILLED", [])
        there = dict(memory.runs)
        memory.runs.clear()
    [run] = there.values()
    assert [m.step for m in run["metrics"] if m.key == "loss"] == [1, 2, 3, 4]


def test_a_finished_run_sends_what_is_missing_and_then_asks_nothing(
    memory: Memory, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    memory.failing = lambda: True
    lines = JsonLines(tmp_path / "metrics.jsonl", step=0)
    (tmp_path / "recipe.yaml").write_text("seed: 0")
    history = MLflow(tmp_path, Tracking("http://me:hidden@server"), {})
    for step in range(1, 5):
        lines.log(record(step))
        history.log(record(step))
    began = time.monotonic()
    history.close("FINISHED", [tmp_path / "recipe.yaml"])
    assert 0.9 < time.monotonic() - began < 10
    lacks = "it lacks steps of this start, and recipe.yaml"  # nobody knows what such a server has
    assert f"MLflow at http://server: refused; {lacks}" in caplog.text
    assert "the same command sends the rest" in caplog.text
    (tmp_path / "summary.json").write_text(json.dumps({"steps": 4, "linear/top1": 9.0, "health": []}))
    memory.failing = lambda: False
    send_missing(tmp_path, Tracking("http://me:hidden@server"), {"seed": 0})
    assert "hidden" not in caplog.text + (tmp_path / "mlflow.json").read_text()
    [run] = memory.runs.values()
    assert run["status"] == "FINISHED"
    assert run["files"] == ["recipe.yaml", "summary.json"]
    assert memory.count()["loss", 4] == memory.count()["linear/top1", 5] == 1
    before = len(run["metrics"])
    asked = memory.clients
    send_missing(tmp_path, Tracking("http://server"), {"seed": 0})
    send_missing(tmp_path, Tracking("http://another"), {"seed": 0})
    assert memory.clients == asked
    assert len(run["metrics"]) == before


def test_a_run_whose_process_died_is_ended_when_it_is_seen(memory: Memory, tmp_path: Path):
    """Once: afterwards the server is not asked again. A run that continues is running again."""
    note, tracking = tmp_path / "mlflow.json", Tracking("http://server")
    history = MLflow(tmp_path, tracking, {})
    logged(history, range(1, 3), 0.02)
    wait_for(lambda: memory.runs and ("loss", 2) in memory.count())
    history.given_up.set()  # killed
    history.thread.join()
    [run] = memory.runs.values()
    memory.failing = lambda: True
    assert not mend(tracking, note, "KILLED")  # the server is away
    memory.failing = lambda: False
    assert run["status"] == "RUNNING"
    assert mend(tracking, note, "KILLED")
    assert run["status"] == "KILLED"
    asked = memory.clients
    assert not mend(tracking, note, "FAILED")
    assert not mend(Tracking("http://another"), note, "FAILED")
    assert memory.clients == asked
    again = MLflow(tmp_path, tracking, {})
    wait_for(lambda: run["status"] == "RUNNING")
    again.given_up.set()
    again.thread.join()
    assert mend(tracking, note, "FAILED")
    assert run["status"] == "FAILED"


def test_data_sets_are_inputs_of_the_run(memory: Memory, tmp_path: Path):
    data = DataInput("training", "shapes", "0123", "local", "{}", "{}")
    MLflow(tmp_path, Tracking("http://server"), {}, [data]).close("KILLED", [])
    [run] = memory.runs.values()
    [[sent]] = run["inputs"]
    assert (sent.dataset.name, sent.dataset.digest, sent.tags[0].value) == ("shapes", "0123", "training")


def test_the_machine_is_watched(memory: Memory, tmp_path: Path):
    history = MLflow(tmp_path, Tracking("http://server"), {})
    history.log(record(7))
    time.sleep(0.5)
    history.close("KILLED", [])
    [run] = memory.runs.values()
    seen = {m.key: m for m in run["metrics"] if m.key.startswith("system/")}
    assert {"system/cpu_utilization_percentage", "system/disk_usage_percentage"} <= seen.keys()
    assert 0 < seen["system/system_memory_usage_percentage"].value < 100
    assert 0 <= seen["system/cpu_utilization_percentage"].value <= 100
    assert seen["system/system_memory_usage_percentage"].step == 7


def test_the_load_before_the_first_record_of_a_continued_run_is_of_the_step_it_had_reached(
    memory: Memory, tmp_path: Path
):
    JsonLines(tmp_path / "metrics.jsonl").log(record(6), record(7))
    history = MLflow(tmp_path, Tracking("http://server"), {}, step=7)
    time.sleep(0.5)
    history.close("KILLED", [])
    [run] = memory.runs.values()
    assert {m.step for m in run["metrics"] if m.key.startswith("system/")} == {7}


def test_an_address_that_is_none_is_told_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    history = MLflow(tmp_path, Tracking("none"), {})
    history.log(record(1))
    began = time.monotonic()
    history.close("FINISHED", [])
    assert time.monotonic() - began < 20
    [warning] = caplog.messages
    assert warning.startswith("MLflow at none cannot be used, metrics go to metrics.jsonl alone: ")


def test_parent_and_child(memory: Memory, tmp_path: Path):
    tracking = Tracking("http://server", experiment="sweeps")
    parent = parent_run(tracking, tmp_path / "parent.json", "lr", {"trials": 8})
    assert parent == parent_run(tracking, tmp_path / "parent.json", "lr", {"trials": 8})
    child = Tracking("http://server", parent=parent, name="lr=0.1", tags={"trial": "a1"})
    (tmp_path / "trial").mkdir()
    MLflow(tmp_path / "trial", child, {}).close("FINISHED", [])
    first, second = memory.runs.values()
    assert first["name"] == "lr"
    assert second["name"] == "lr=0.1"
    assert second["tags"].items() >= {"mlflow.parentRunId": parent, "trial": "a1"}.items()
    finish(tracking, parent, "FINISHED", {"best": 0.5}, [tmp_path / "parent.json"])
    assert first["status"] == "FINISHED"
    assert [(m.key, m.value) for m in first["metrics"]] == [("best", 0.5)]
    memory.failing = lambda: True
    with pytest.raises(
        Outage,
        match=r"MLflow at http://server: refused; given up after .*; run the same command again",
    ):
        finish(tracking, parent, "FINISHED", {"best": 0.5}, [])


def test_a_wrong_password_ends_a_sweep_at_once(memory: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Refused(Exception):
        def get_http_status_code(self) -> int:
            return 401

    def refuse(*_: object) -> None:
        raise Refused("You are not authenticated")

    monkeypatch.setattr(MLflowRun, "open", refuse)
    with pytest.raises(UserError, match=r"MLflow at http://server: You are not authenticated; set MLFLOW_TRACKING_U"):
        parent_run(Tracking("http://me:secret@server"), tmp_path / "parent.json", "lr", {})


def test_a_question_mark_in_the_path_of_the_database_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert tracking_of(tmp_path / "run?x").uri == f"sqlite:///{tmp_path}/mlflow.db"
    with pytest.raises(UserError, match="would end at its question mark"):
        tracking_of(tmp_path / "runs?x" / "run")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://me:secret@host:5000/x", "http://host:5000/x"),
        ("request to https://me:p@ss@host/api failed", "request to https://host/api failed"),
        ("postgresql+psycopg://me:secret@host/db", "postgresql+psycopg://host/db"),
        ("postgresql://host/db?user=me&password=secret&x=1", "postgresql://host/db?user=me&password=...&x=1"),
        ("sqlite:////runs/mlflow.db", "sqlite:////runs/mlflow.db"),
        ("http://host/a@b", "http://host/a@b"),
        ("http://host:5000/a@b", "http://host:5000/a@b"),
        ("http://me:SEC/RET@host/x", "http://host/x"),
        ("postgresql://me:SEC RET@host/x", "postgresql://host/x"),
        ("s3://AKIA:SEC/RET+x=@bucket/run is missing", "s3://bucket/run is missing"),
        ("https://h/x?api_key=SECRET&a=1", "https://h/x?api_key=...&a=1"),
        ("https://h/x?sv=1&sig=SECRET", "https://h/x?sv=1&sig=..."),
        (
            "https://h/x?X-Amz-Credential=AK%2Fx&X-Amz-Signature=ab",
            "https://h/x?X-Amz-Credential=...&X-Amz-Signature=...",
        ),
        ("MLFLOW_TRACKING_PASSWORD='x y'", "MLFLOW_TRACKING_PASSWORD='x y'"),
        ("AWS_SECRET_ACCESS_KEY=abc", "AWS_SECRET_ACCESS_KEY=..."),
        ("backbone.options.class_token=false", "backbone.options.class_token=false"),
    ],
)
def test_addresses_are_shown_without_passwords(text: str, expected: str):
    assert hide_secrets(text) == expected
    assert "secret" not in repr(Tracking("http://me:secret@host"))


@pytest.fixture
def hanging() -> Iterator[str]:
    """The address of a server that accepts and never answers."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen(100)
        kept = []
        threading.Thread(target=lambda: [kept.append(s.accept()) for _ in range(1000)], daemon=True).start()
        yield f"http://127.0.0.1:{s.getsockname()[1]}"


@pytest.mark.slow
def test_a_server_that_hangs_or_is_dead_holds_nobody_up(
    hanging: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    for name, value in {"REPLY": 2, "STORED": 2, "PATIENCE": 3.0}.items():
        monkeypatch.setattr(mlflow_thread, name, value)
    for uri, why in ((hanging, "Read timed out"), (f"http://127.0.0.1:{free_port()}", "refused")):
        caplog.clear()
        history = MLflow(tmp_path, Tracking(uri), {})
        held = logged(history, range(1, 300), 0.01)
        assert held < BLOCKED
        began = time.monotonic()
        history.close("FINISHED", [])
        assert time.monotonic() - began < 10
        said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        first, last = (m for m in said if uri in m)  # threads of other tests may still say something
        assert why in first
        assert why in last
