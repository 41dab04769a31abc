"""A sweep with its folder in a real S3 store, on Ray nodes and from drivers that share no disk."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import forked
from helpers.mlflow_server import Server
from helpers.mlflow_server import running as mlflow_running
from helpers.ray_nodes import add, ray_cluster
from helpers.recipes import small_recipe
from helpers.s3.server import store_of
from helpers.sweeps import (
    LONG,
    PACKAGE,
    accounted,
    ended,
    start,
    stored,
    through,
    trained_on,
    trial_settings,
    wait,
    wait_until,
    write,
    write_long,
)

from eagleray.base.files import read_lines
from eagleray.engine import checkpoint
from eagleray.reports.write import report
from eagleray.runs.tracking import Tracking
from eagleray.storage import store
from eagleray.sweeps.trial import Trial

pytestmark = pytest.mark.slow
OUT, TRIALS = "s3://sweeps/small", 16  # enough that the sweep lasts until a node has joined and both kills are done


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[str]:
    """A server with a bucket, which all processes are told of."""
    with store_of(tmp_path / "s3", "sweeps"):
        yield OUT


@pytest.fixture
def mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    (tmp_path / "mlflow").mkdir()
    with mlflow_running(tmp_path / "mlflow") as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
        yield server


@pytest.fixture
def cluster(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head that only directs, and one node whose processes keep their files in a folder of their own."""
    with ray_cluster(monkeypatch, PYTHONPATH=str(PACKAGE)) as cluster:
        add(cluster, XDG_CACHE_HOME=str(tmp_path / "node-a"))
        yield cluster


def test_a_trial_in_a_store_goes_on_from_another_folder(
    bucket: str, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def settings(trials: str, **changes: Any) -> dict[str, Any]:
        longer = ("optim.epochs=40", "monitor.every=50", "checkpoint.steps=50")  # a store is asked every 3 s
        return trial_settings(shards, tmp_path, trials, {"optim.lr.value": 1e-3}, *longer) | changes

    whole = through(Trial("000", settings(str(tmp_path)), Tracking("none")))
    out = f"{OUT}/trials"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "one"))
    first = Trial("000", settings(out), Tracking("none"))
    began = [first.next()]
    first.end()
    assert first.summary == {}, "stopped before its end"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "two"))
    second = Trial("000", settings(out, after=began[-1]["percent"]), Tracking("none"))
    rest = through(second)
    second.end()
    keep = ("step", "steps", "percent", "value")
    assert [[r[k] for k in keep] for r in began + rest] == [[r[k] for k in keep] for r in whole]
    assert any(line.get("step") for line in stored(f"{OUT}/trials/000/starts.jsonl"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "three"))
    [last] = through(Trial("000", settings(out, after=99.0), Tracking("none")))
    assert (last["percent"], last["value"]) == (100, whole[-1]["value"]), "is known to be finished"


@pytest.mark.timeout(6 * LONG)
def test_a_sweep_in_a_store_is_killed_twice_and_moves(cluster: Any, mlflow: Server, shards: Path, tmp_path: Path):
    """Its drivers have separate folders, as its nodes have; the second node joins while it runs."""
    sweep = write_long(tmp_path, TRIALS)

    def drive(place: str, *more: str) -> subprocess.Popen[str]:
        return start(sweep, shards, OUT, *more, XDG_CACHE_HOME=str(tmp_path / place))

    def running() -> int:
        return sum(r["state"] == "running" for r in stored(f"{OUT}/trials.jsonl"))

    def steps() -> int:
        return sum(r["step"] for r in stored(f"{OUT}/trials.jsonl"))

    def saved() -> bool:
        """A trial that runs has a checkpoint in the store, so that it can go on from there."""
        there = [r["id"] for r in stored(f"{OUT}/trials.jsonl") if r["state"] == "running"]
        return any(checkpoint.manifests(f"{OUT}/trials/{name}/checkpoints") for name in there)

    process = drive("one")
    wait_until(lambda: steps() >= 30, process)
    assert running() <= 1, "one node has one CPU"
    add(cluster, XDG_CACHE_HOME=str(tmp_path / "node-b"))
    wait_until(lambda: running() == 2, process)
    for place in ("two", "one"):
        reached = steps()
        wait_until(lambda: steps() >= reached + 45 and saved(), process)  # noqa: B023
        process.kill()
        process.communicate()
        before = {r["id"]: r for r in stored(f"{OUT}/trials.jsonl")}
        assert any(r["state"] == "running" for r in before.values())
        process = drive(place, "--resume")
    text = wait(process)
    assert process.returncode == 0, text
    assert "continues" in text
    done = stored(f"{OUT}/trials.jsonl")
    ended(done, before, TRIALS)
    starts = [stored(f"{OUT}/trials/{r['id']}/starts.jsonl") for r in done]
    assert any(s.get("step") for lines in starts for s in lines), "a trial went on from its own checkpoint"
    accounted(mlflow.uri, "small", TRIALS)
    assert "Sweep small" in Path(report([OUT])[0]).read_text()
    trained_on(tmp_path / "node-a", tmp_path / "node-b")
    reproduced(max((r for r in done if r["state"] == "finished"), key=lambda r: r["metric"]), tmp_path)


def reproduced(best: dict[str, Any], folder: Path) -> None:
    """best.yaml gives the number of the best trial again."""
    recipe = folder / "best.yaml"
    recipe.write_bytes(store.store(OUT).get(f"{OUT}/best.yaml"))
    command = [sys.executable, "-m", "eagleray.cli", "pretrain", str(recipe), f"out={folder / 'again'}"]
    forked.run(command, check=True)
    seen = [r["monitor/knn"] for r in read_lines(folder / "again" / "metrics.jsonl") if "monitor/knn" in r]
    assert seen[-1] == best["metric"]


def test_a_store_without_permission_is_one_line(
    bucket: str, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    (tmp_path / "mocov3.yaml").write_text(small_recipe("mocov3"))
    sweep = write(tmp_path / "sweep.yaml", alternatives={"": {"recipe": "mocov3.yaml"}})
    text = wait(process := start(sweep, shards, OUT, XDG_CACHE_HOME=str(tmp_path / "one")))
    assert process.returncode == 2, text
    [line] = text.splitlines()
    assert line.startswith(f"error: out={OUT}: cannot be written: ")
    assert "SignatureDoesNotMatch" in line or "AccessDenied" in line
