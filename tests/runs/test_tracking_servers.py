"""Real MLflow servers that go away and come back, and what they have missed."""

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import forked, mlflow_server
from helpers.processes import wait_for
from helpers.tracking import BLOCKED, logged
from mlflow import MlflowClient

from eagleray.base.files import JsonLines, read_lines
from eagleray.runs import mlflow_thread
from eagleray.runs.mlflow_requests import finish, parent_run, send_missing
from eagleray.runs.mlflow_thread import MLflow
from eagleray.runs.tracking import Tracking

AWAY = 20  # seconds for which a server is away


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[mlflow_server.Server]:
    root = tmp_path_factory.mktemp(request.param)
    if request.param == "sqlite":
        with mlflow_server.running(root) as server:
            yield server
    else:
        with mlflow_server.postgres() as database, mlflow_server.running(root, database) as server:
            yield server


def steps_there(server: mlflow_server.Server, out: Path) -> list[int]:
    """The steps of the loss, in order of their logging, of the only run of that name."""
    client = MlflowClient(server.uri)
    found = client.search_runs(
        [client.get_experiment_by_name("eagleray").experiment_id], f"attributes.run_name = '{out.name}'"
    )
    [run] = found
    return [m.step for m in client.get_metric_history(run.info.run_id, "loss")]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_server_that_is_away_for_a_while_misses_nothing(
    server: mlflow_server.Server, tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
):
    out = tmp_path / f"away-{how}-{time.time():.0f}"
    out.mkdir()
    caplog.set_level(logging.INFO)
    lines = JsonLines(out / "metrics.jsonl", step=0)
    history = MLflow(out, Tracking(server.uri), {"seed": 0})
    held = [logged(history, range(1, 51), 0.05, lines)]
    server.signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    held.append(logged(history, range(51, 51 + AWAY * 20), 0.05, lines))
    if how == "killed":
        server.start()
    else:
        server.signal(signal.SIGCONT)
    held.append(logged(history, range(51 + AWAY * 20, 551), 0.05, lines))
    history.close("FINISHED", [out / "metrics.jsonl"])
    assert not history.thread.is_alive()
    assert sorted(steps_there(server, out)) == list(range(1, 551))
    assert "records are sent when it answers again" in caplog.text
    assert "answers again" in caplog.text
    assert max(held) < BLOCKED, held


RUN = """
import sys, time
from pathlib import Path
from eagleray.base.files import JsonLines
from eagleray.runs.mlflow_thread import MLflow
from eagleray.runs.tracking import Tracking
out, uri, begin, end = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
lines = JsonLines(out / "metrics.jsonl", step=begin)
history = MLflow(out, Tracking(uri), {})
for step in range(begin + 1, end + 1):
    lines.log({"step": step, "loss": 1 / step})
    history.log({"step": step, "loss": 1 / step})
    time.sleep(0.05)
history.close("KILLED", [])
"""


@pytest.mark.slow
def test_a_run_killed_while_the_server_was_away_loses_nothing(server: mlflow_server.Server, tmp_path: Path):
    out = tmp_path / f"lost-{time.time():.0f}"
    out.mkdir()
    command = [sys.executable, "-c", RUN, str(out), server.uri]
    environment = os.environ | {"PYTHONPATH": str(Path(mlflow_thread.__file__).parents[2])}
    process = forked.Popen([*command, "0", "100000"], env=environment)
    wait_for(lambda: (out / "mlflow.json").exists() and "run_id" in (out / "mlflow.json").read_text())
    server.signal(signal.SIGKILL)
    here = len(read_lines(out / "metrics.jsonl"))
    wait_for(lambda: len(read_lines(out / "metrics.jsonl")) > here + 100)
    process.kill()
    process.wait()
    last = read_lines(out / "metrics.jsonl")[-1]["step"]
    server.start()
    assert max(steps_there(server, out), default=0) < last - 50
    done = forked.run([*command, str(last - 20), str(last + 20)], env=environment, timeout=300, check=False)
    assert done.returncode == 0
    assert sorted(steps_there(server, out)) == list(range(1, last + 21))


@pytest.mark.slow
def test_what_a_server_missed_at_the_end_is_sent_by_the_next_command(
    server: mlflow_server.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Under a parent, with files."""
    monkeypatch.setattr(mlflow_thread, "PATIENCE", 3.0)
    out = tmp_path / f"end-{time.time():.0f}"
    (out / "export").mkdir(parents=True)
    for name in ("recipe.yaml", "summary.json", "export/backbone.json"):
        (out / name).write_text(json.dumps({"steps": 30, "linear/top1": 9.0}))
    parent = parent_run(Tracking(server.uri), tmp_path / "parent.json", "sweep", {"trials": 1})
    tracking = Tracking(server.uri, parent=parent, tags={"trial": "a1"})
    lines = JsonLines(out / "metrics.jsonl", step=0)
    history = MLflow(out, tracking, {"seed": 0})
    logged(history, range(1, 21), 0.1, lines)
    server.signal(signal.SIGKILL)
    logged(history, range(21, 31), 0.1, lines)
    history.close("FINISHED", [out / "export"])
    assert history.thread.is_alive()
    server.start()
    send_missing(out, tracking, {"seed": 0})
    assert sorted(steps_there(server, out)) == list(range(1, 31))
    run = MlflowClient(server.uri).get_run(history.run.id)
    assert run.info.status == "FINISHED"
    assert run.data.params == {"seed": "0"}
    assert run.data.metrics["linear/top1"] == 9.0
    assert run.data.tags.items() >= {"mlflow.parentRunId": parent, "trial": "a1"}.items()
    files = MlflowClient(server.uri).list_artifacts(history.run.id)
    assert {f.path for f in files} == {"recipe.yaml", "summary.json"}
    finish(Tracking(server.uri), parent, "FINISHED", {"best": 9.0}, [tmp_path / "parent.json"])
    assert MlflowClient(server.uri).get_run(parent).info.status == "FINISHED"
