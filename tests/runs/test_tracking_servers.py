"""Real MLflow servers that go away and come back, and what they have missed."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import forked, mlflow_server
from helpers.processes import wait_for
from helpers.tracking import BLOCKED, logged, steps_there, the_run

from eagleray.base.files import read_lines
from eagleray.runs import mlflow_log
from eagleray.runs.mlflow_log import MLflow
from eagleray.runs.mlflow_run import send_missing
from eagleray.runs.tracking import Tracking, tracking_of


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[mlflow_server.Server]:
    root = tmp_path_factory.mktemp(request.param)
    if request.param == "sqlite":
        with mlflow_server.running(root) as server:
            yield server
    else:
        with mlflow_server.postgres() as database, mlflow_server.running(root, database) as server:
            yield server


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_server_that_is_away_for_a_while_misses_nothing(
    server: mlflow_server.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
):
    """Stopped, it accepts and does not answer, and afterwards does what it was asked."""
    monkeypatch.setattr(mlflow_log, "LOAD", 1.0)
    (out := tmp_path / f"away-{how}").mkdir()
    history = MLflow(out, Tracking(server.uri), {"seed": 0})
    wait_for(lambda: history.ready)
    held = [logged(history, range(1, 51), 0.05)]
    server.signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    held.append(logged(history, range(51, 251), 0.05))
    if how == "killed":
        server.start()
    else:
        server.signal(signal.SIGCONT)
    wait_for(lambda: history.ready)
    held.append(logged(history, range(251, 301), 0.05))
    history.close("FINISHED", [out / "metrics.jsonl"])
    assert steps_there(server.uri, out) == list(range(1, 301))
    assert the_run(server.uri, out.name)[1].info.status == "FINISHED"
    assert max(held) < BLOCKED, held


RUN = """
import sys
from pathlib import Path
from helpers.tracking import logged
from eagleray.runs.mlflow_log import MLflow
from eagleray.runs.tracking import Tracking
out, uri, begin, end = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
history = MLflow(out, Tracking(uri), {})
logged(history, range(begin + 1, end + 1), 0.05)
history.close("KILLED", [])
"""


@pytest.mark.slow
def test_a_run_killed_while_the_server_was_away_loses_nothing(
    server: mlflow_server.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The next start sends it. What the server misses at its end, a command sends."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    (out := tmp_path / "lost").mkdir()
    command = [sys.executable, "-c", RUN, str(out), server.uri]
    root = Path(mlflow_log.__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": f"{root}:{root.parent / 'tests'}"}
    process = forked.Popen([*command, "0", "100000"], env=environment)
    wait_for(lambda: (out / "mlflow.json").exists() and "run_id" in (out / "mlflow.json").read_text())
    server.signal(signal.SIGKILL)
    here = len(read_lines(out / "metrics.jsonl"))
    wait_for(lambda: len(read_lines(out / "metrics.jsonl")) > here + 100)
    process.kill()
    process.wait()
    last = read_lines(out / "metrics.jsonl")[-1]["step"]
    server.start()
    assert max(steps_there(server.uri, out), default=0) < last - 50
    done = forked.run([*command, str(last - 20), str(last + 20)], env=environment, timeout=300, check=False)
    assert done.returncode == 0
    assert steps_there(server.uri, out) == list(range(1, last + 21))
    server.signal(signal.SIGKILL)
    assert forked.run([*command, str(last + 20), str(last + 40)], env=environment, timeout=300).returncode == 0
    server.start()
    assert "status FINISHED" in send_missing(out, tracking_of(out), {}, "FINISHED")
    assert steps_there(server.uri, out) == list(range(1, last + 41))
