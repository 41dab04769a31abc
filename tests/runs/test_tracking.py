"""What MLflow is told: every step once, whatever happens to its server or to the run, and nobody waits for it."""

import json
import logging
import random
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers.processes import free_port, wait_for
from helpers.tracking import BLOCKED, logged, record, steps_there, the_run
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import CUSTOMER_UNAUTHORIZED
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

from eagleray.base.errors import Outage, UserError, hide_secrets
from eagleray.runs import mlflow_log, mlflow_run
from eagleray.runs.mlflow_log import MLflow
from eagleray.runs.mlflow_run import connect, mend, parent_run, send_missing, update
from eagleray.runs.tracking import DataInput, Tracking, begin_anew, read_note, tracking_of

CALLS = ("log_batch", "get_run", "create_run", "update_run_info", "get_experiment_by_name", "log_inputs")
DATA = (DataInput("training", "shapes", "0123", "local", "{}", "{}"),)
PARAMS = {f"key{i}": i for i in range(150)} | {"long": "x" * 7000}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database of MLflow, which takes seconds to make."""
    path = tmp_path_factory.mktemp("made") / "mlflow.db"
    connect(f"sqlite:///{path}")
    return path


class Server:
    """MLflow on its own database, which fails when it is told to, before or after it has done what it was asked."""

    def __init__(self, folder: Path) -> None:
        self.uri, self.out = f"sqlite:///{folder}/mlflow.db", folder / "run"
        self.failing: Callable[[], bool] = lambda: False
        self.asked = 0
        self.out.mkdir()

    def begin(self, params: dict[str, Any] | None = None, step: int = 0) -> MLflow:
        return MLflow(self.out, Tracking(self.uri), params or {}, DATA, step)

    def track(self, status: str = "FINISHED") -> str:
        return send_missing(self.out, tracking_of(self.out), {}, status)


@pytest.fixture
def server(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    server = Server(tmp_path)
    shutil.copy(made, tmp_path / "mlflow.db")

    def flaky(call: Callable[..., Any]) -> Callable[..., Any]:
        def asked(*args: Any, **more: Any) -> Any:
            server.asked += 1
            if server.failing():
                raise MlflowException("refused")
            reply = call(*args, **more)
            if server.failing():
                raise MlflowException("no reply")
            return reply

        return asked

    for name in CALLS:
        monkeypatch.setattr(SqlAlchemyStore, name, flaky(getattr(SqlAlchemyStore, name)))
    monkeypatch.setattr(mlflow_log, "LOAD", 0.05)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return server


def killed(history: MLflow) -> None:
    """Nothing is closed; the thread stops in the middle of what it does."""
    history.closing.set()
    history.thread.join()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and r.name.startswith("eagleray")]


@pytest.mark.parametrize("seed", range(3))
def test_every_step_once_through_any_sequence_of_failures(server: Server, seed: int):
    """The server fails one call in three, and the run is killed and goes back to a checkpoint. At its end a command
    sends what is missing."""
    chance = random.Random(seed)
    step = begun = 0
    while step < 40:
        server.failing = lambda: chance.random() < 0.18
        history, begun = server.begin(PARAMS, step), step
        upto = min(step + chance.randint(3, 20), 40)
        logged(history, range(step + 1, upto + 1), 0.02)
        step = upto
        if step < 40:
            killed(history)
            wait_for(lambda history=history: not history.flying or history.flying.done())
            step = chance.randint(begun, step)
    history.close("FINISHED", [])
    server.failing = lambda: False
    server.track()
    assert server.track().endswith("nothing was missing")
    run = the_run(server.uri, "run")[1]
    assert run.info.status == "FINISHED"
    assert run.data.params == {k: str(v)[:6000] for k, v in PARAMS.items()}
    assert steps_there(server.uri, server.out) == list(range(1, 41))
    assert steps_there(server.uri, server.out, "knn/top1") == list(range(3, 41, 3))
    [data] = run.inputs.dataset_inputs
    assert (data.dataset.name, data.dataset.digest, data.tags[0].value) == ("shapes", "0123", "training")


def test_a_server_that_comes_back_gets_the_steps_that_it_missed(server: Server, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    history = server.begin()
    wait_for(lambda: history.ready)
    logged(history, range(1, 3), 0.05)
    server.failing = lambda: True
    logged(history, range(3, 20), 0.02)
    # The disk may be slow: the outage goes on until a request has met it.
    wait_for(lambda: history.away or bool(history.flying and history.flying.done()))
    server.failing = lambda: False
    wait_for(lambda: history.ready)
    logged(history, range(20, 22))
    history.close("FINISHED", [])
    assert steps_there(server.uri, server.out) == list(range(1, 22))
    [line] = warnings(caplog)
    assert re.fullmatch(
        rf"MLflow at {server.uri}: (refused|no reply); `eagleray track .*/run` sends what is missing", line
    )
    assert f"MLflow at {server.uri} answers again" in caplog.messages


def test_steps_that_are_taken_again_are_not_sent_again(server: Server):
    for begin in (0, 4):  # the second start is from a checkpoint at step 4
        history = server.begin(step=begin)
        logged(history, range(begin + 1, begin + 11), 0.01)
        history.close("KILLED", [])
        assert the_run(server.uri, "run")[1].info.status == "KILLED"
    assert steps_there(server.uri, server.out) == list(range(1, 15))


def test_a_run_that_goes_back_to_forget_is_another_run_there(server: Server):
    """Its steps are taken again with other images, and end in another model."""
    for _ in range(2):
        history = server.begin()
        logged(history, range(1, 5))
        history.close("FINISHED", [])
        begin_anew(server.out / "mlflow.json")
    client = connect(server.uri)
    runs = client.search_runs([client.get_experiment_by_name("eagleray").experiment_id])
    steps = [sorted(m.step for m in client.get_metric_history(r.info.run_id, "loss")) for r in runs]
    assert steps == [[1, 2, 3, 4]] * 2


def test_what_is_missing_is_sent_once_by_hand(server: Server, caplog: pytest.LogCaptureFixture):
    """A hole in the middle, the numbers of the start and of the end, files and the status; a file again when it has
    changed."""
    history = server.begin({"out": "runs/a"})
    wait_for(lambda: history.ready)
    server.failing = lambda: True
    logged(history, range(1, 1200))
    history.close("FINISHED", [server.out / "metrics.jsonl"])
    [line] = warnings(caplog)
    assert line.endswith("refused; `eagleray track runs/a` sends what is missing")
    server.failing = lambda: False
    history.run.send(mlflow_run.metrics_of(record(1000), 1))
    (server.out / "start.json").write_text(json.dumps({"knn/top1": 20.0}))
    (server.out / "summary.json").write_text(json.dumps({"steps": 1199, "linear/top1": 9.0, "health": []}))
    (server.out / "report").mkdir()
    (server.out / "report" / "loss.png").write_bytes(b"png")
    there, _, sent = server.track().rpartition(": ")
    assert there == f"MLflow at {server.uri}, run {history.run.id}"
    assert {*sent.split(", ")} == {"2798 numbers", "2 files", "status FINISHED"}
    assert server.track().endswith("nothing was missing")
    (server.out / "report" / "loss.png").write_bytes(b"new")
    assert server.track().endswith(": 1 file")
    assert steps_there(server.uri, server.out) == list(range(1, 1200))
    assert steps_there(server.uri, server.out, "knn/top1") == list(range(0, 1200, 3))
    assert steps_there(server.uri, server.out, "linear/top1") == [1200]


def test_a_deleted_experiment_is_one_line_without_a_wait(server: Server, caplog: pytest.LogCaptureFixture):
    """For a run that it holds and for a new one. The id stays, so that the run goes on when the experiment is back."""
    first = server.begin()
    logged(first, range(1, 4), 0.05)
    first.close("KILLED", [])
    client, run = the_run(server.uri, "run")
    client.delete_experiment(run.info.experiment_id)
    for name in ("run", "new"):
        (server.out.parent / name).mkdir(exist_ok=True)
        caplog.clear()
        history = MLflow(server.out.parent / name, Tracking(server.uri), {"out": f"runs/{name}"})
        logged(history, range(4, 7), 0.05)
        wait_for(lambda history=history: history.over)
        asked, began = server.asked, time.monotonic()
        logged(history, range(7, 9), 0.1)
        history.close("FINISHED", [])
        assert server.asked == asked, "it is not tried again"
        assert time.monotonic() - began < mlflow_log.LONGEST / 2
        restore = (
            f"MLFLOW_TRACKING_URI={server.uri} mlflow experiments restore --experiment-id {run.info.experiment_id}"
        )
        says = f"the experiment eagleray was deleted there; `{restore}` brings it back"
        assert warnings(caplog) == [f"MLflow at {server.uri}: {says}; then `eagleray track runs/{name}` sends the run"]
    with pytest.raises(UserError, match="is MLFLOW_TRACKING_URI right"):
        send_missing(server.out, Tracking("htp://wrong"), {}, "KILLED")
    assert read_note(server.out / "mlflow.json", server.uri)["run_id"] == run.info.run_id
    client.restore_experiment(run.info.experiment_id)
    server.track()
    assert steps_there(server.uri, server.out) == list(range(1, 9))
    client.delete_run(run.info.run_id)
    with pytest.raises(UserError, match=f"run {run.info.run_id} was deleted there; `.*mlflow runs restore --run-id "):
        server.track()


@pytest.mark.parametrize("uri", ["htp://localhost:5000", "localhost:5000", "none", "file:///tmp/mlruns"])
def test_an_address_that_is_none_is_told_at_once(uri: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    history = MLflow(tmp_path, Tracking(uri), {"out": "runs/a"})
    wait_for(lambda: history.over)
    began = time.monotonic()
    logged(history, range(1, 3))
    history.close("FINISHED", [])
    assert time.monotonic() - began < mlflow_log.LONGEST / 2
    [line] = warnings(caplog)
    assert line.startswith(f"MLflow at {uri}: ")
    assert line.endswith("; is MLFLOW_TRACKING_URI right?; then `eagleray track runs/a` sends the run")


def test_a_wrong_password_is_told_with_the_variables(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def refuse(*_: object) -> None:
        raise MlflowException("You are not authenticated", CUSTOMER_UNAUTHORIZED)

    monkeypatch.setattr(SqlAlchemyStore, "get_experiment_by_name", refuse)
    with pytest.raises(UserError, match=r"You are not authenticated; set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACK"):
        parent_run(Tracking(server.uri), tmp_path / "parent.json", "lr", {})


@pytest.fixture
def hanging() -> Iterator[str]:
    """The address of a server that accepts and never answers."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen(100)
        yield f"http://me:hidden@127.0.0.1:{s.getsockname()[1]}"


def test_a_server_that_hangs_or_is_dead_holds_nobody_up(
    hanging: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(mlflow_log, "REPLY", 1)
    for uri, why in ((hanging, "Read timed out"), (f"http://127.0.0.1:{free_port()}", "refused")):
        caplog.clear()
        history = MLflow(tmp_path, Tracking(uri), {})
        assert logged(history, range(1, 100), 0.005) < BLOCKED
        began = time.monotonic()
        history.close("FINISHED", [])
        assert time.monotonic() - began < mlflow_log.LONGEST / 2
        [line] = warnings(caplog)
        assert line.startswith(f"MLflow at {hide_secrets(uri)}: ")
        assert why in line
        assert line.endswith(f"; `eagleray track {tmp_path}` sends what is missing")
    assert "hidden" not in caplog.text + (tmp_path / "mlflow.json").read_text()


def test_a_run_that_the_server_has_lost_is_told_again_in_another(server: Server, made: Path):
    for begin in (0, 2):
        history = server.begin(step=begin)
        logged(history, range(begin + 1, begin + 3))
        history.close("KILLED", [server.out / "metrics.jsonl"])
        if not begin:
            shutil.copy(made, server.out.parent / "mlflow.db")
    assert steps_there(server.uri, server.out) == [1, 2, 3, 4]
    client, run = the_run(server.uri, "run")
    assert [f.path for f in client.list_artifacts(run.info.run_id)] == ["metrics.jsonl"]


def test_a_run_whose_process_died_is_ended_when_it_is_seen(server: Server):
    """Once: afterwards the server is not asked again. A run that continues is running again."""
    note, tracking = server.out / "mlflow.json", Tracking(server.uri)
    killed(server.begin())
    assert the_run(server.uri, "run")[1].info.status == "RUNNING"
    server.failing = lambda: True
    assert not mend(tracking, note, "KILLED")
    server.failing = lambda: False
    assert mend(tracking, note, "KILLED")
    assert the_run(server.uri, "run")[1].info.status == "KILLED"
    asked = server.asked
    assert not mend(tracking, note, "FAILED")
    assert not mend(Tracking("http://another"), note, "FAILED")
    assert server.asked == asked
    killed(server.begin())
    assert the_run(server.uri, "run")[1].info.status == "RUNNING"


def test_the_load_of_the_machine_is_that_of_the_step_it_had_reached(server: Server):
    history = server.begin(step=7)
    wait_for(lambda: history.loads)
    history.close("KILLED", [])
    client, run = the_run(server.uri, "run")
    seen = {k: v for k, v in run.data.metrics.items() if k.startswith("system/")}
    assert {"system/cpu_utilization_percentage", "system/disk_usage_percentage"} <= seen.keys()
    assert 0 < seen["system/system_memory_usage_percentage"] < 100
    assert {m.step for k in seen for m in client.get_metric_history(run.info.run_id, k)} == {7}


def test_parent_and_child(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A child keeps its parent, and the user who began it, when a command of another user sends it."""
    monkeypatch.setenv("EAGLERAY_USER", "grace")
    tracking, note = Tracking(server.uri), tmp_path / "parent.json"
    parent = parent_run(tracking, note, "lr", {"trials": 8})
    assert parent == parent_run(tracking, note, "lr", {"trials": 8})
    server.failing = lambda: True
    MLflow(server.out, Tracking(server.uri, parent, "lr=0.1", f"{parent}/0", "ada"), {}).close("FINISHED", [])
    server.failing = lambda: False
    server.track()
    tags = the_run(server.uri, "lr=0.1")[1].data.tags
    assert (tags["mlflow.parentRunId"], tags["eagleray.key"]) == (parent, f"{parent}/0")
    assert tags["mlflow.user"] == "ada"
    assert len(tags["mlflow.source.git.commit"]) == 40
    for _ in range(2):
        update(tracking, note, {"best": 0.5}, [note], "FINISHED")
    client, run = the_run(server.uri, "lr")
    assert run.info.status == "FINISHED"
    assert [m.value for m in client.get_metric_history(parent, "best")] == [0.5]
    server.failing = lambda: True
    with pytest.raises(Outage, match=r"MLflow at sqlite:.*: refused"):
        update(tracking, note, {"best": 0.5})


def test_a_database_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its maker may be killed, and several may make it at once: half of it would be of no use to anybody."""
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"

    def half(uri: str) -> None:
        Path(uri.removeprefix("sqlite:///")).touch()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("mlflow.MlflowClient", half)
        with pytest.raises(KeyboardInterrupt):
            connect(uri)
    assert not list(tmp_path.iterdir())
    with ThreadPoolExecutor() as makers:
        list(makers.map(connect, [uri] * 2))
    assert [p.name for p in tmp_path.iterdir()] == ["mlflow.db"]
    made = connect(uri).create_experiment("one")
    assert connect(uri).get_experiment(made).name == "one"


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
