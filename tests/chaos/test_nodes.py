"""A run on a cluster whose nodes come and go: Ray's own nodes, several of them on this machine."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from chaos.check import verify
from chaos.job import TRACING, Job, Run
from chaos.site import RECIPE, uninterrupted
from helpers.processes import below
from helpers.ray_nodes import add, drain, ray_cluster

from eagleray.base.files import read_lines
from eagleray.cluster.spares import NAME

pytestmark = pytest.mark.slow
KEYS = ["log_steps=1", "checkpoint.steps=20", "monitor.every=1000", "optim.epochs=10000"]


@pytest.fixture
def run(shards: Path, tmp_path: Path) -> Iterator[Run]:
    recipe = tmp_path / "small.yaml"
    recipe.write_text(RECIPE)
    with Run(recipe, str(shards / "train"), tmp_path / "run") as run:
        yield run


@pytest.fixture
def cluster(run: Run, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head that only directs; what runs on its nodes is traced, and takes its time, also to save."""
    run.tracing.mkdir(parents=True)
    paths = os.pathsep.join([str(TRACING), *filter(None, [os.environ.get("PYTHONPATH")])])
    slow = {"EAGLERAY_PACE": "0.1", "EAGLERAY_SAVE": "1"}
    with ray_cluster(monkeypatch, PYTHONPATH=paths, EAGLERAY_TRACE=str(run.tracing), **slow) as cluster:
        yield cluster


def wait_for(what: str, job: Job, come: Callable[[], bool], seconds: float = 900) -> None:
    end = time.monotonic() + seconds
    while not come():
        assert job.process.poll() is None, f"ended before {what}: {job.said()}"
        assert time.monotonic() < end, f"{what}: not in {seconds:.0f} s: {job.said()}"
        time.sleep(0.2)


def starts(run: Run) -> list[dict[str, Any]]:
    return [line for line in read_lines(run.out / "starts.jsonl") if "step" in line]


def training(run: Run, job: Job, ranks: int, more: int = 15) -> None:
    """Wait until so many ranks have taken some steps since they began together."""

    def come() -> bool:
        lines, begun = read_lines(run.out / "metrics.jsonl"), starts(run)
        return bool(begun and lines and begun[-1]["ranks"] == ranks and lines[-1]["step"] >= begun[-1]["step"] + more)

    wait_for(f"{ranks} rank(s) training", job, come)


def verify_up_to(last: int, run: Run) -> None:
    """All ranks were given every sample up to a step once."""
    verify([line for line in run.lines() if line.step <= last], uninterrupted(run, last, KEYS), last)


def stop(run: Run, job: Job) -> int:
    """Ask the job to stop, and return its last step."""
    job.process.send_signal(signal.SIGTERM)
    assert job.finish() == 1, job.said()
    return int(read_lines(run.out / "metrics.jsonl")[-1]["step"])


@pytest.mark.timeout(1800)
def test_nodes_come_and_go_and_no_sample_is_lost_or_given_twice(run: Run, cluster: Any):
    nodes = [add(cluster), add(cluster)]
    job = run.start(0, 0, *KEYS, "workers=1..3")
    training(run, job, 2, more=45)
    nodes.append(add(cluster))
    training(run, job, 3, more=45)
    grown = starts(run)[-1]
    assert grown["reached"] == grown["step"], "steps were taken again although nothing had failed"
    cluster.remove_node(nodes.pop(), allow_graceful=False)
    training(run, job, 2)
    going = nodes.pop()
    drain(cluster, going)
    training(run, job, 1)
    moved = starts(run)[-1]
    assert moved["reached"] == moved["step"], "steps were taken again although the notice came in time"
    cluster.remove_node(going, allow_graceful=False)
    training(run, job, 1, more=30)
    assert [s["ranks"] for s in starts(run)] == [2, 3, 2, 1]
    assert all(s["reached"] - s["step"] <= 20 + 15 for s in starts(run))
    last = stop(run, job)
    job = run.start(0, 0, *KEYS, "workers=1", f"max_steps={last + 10}")  # the driver's end is no end of the run
    assert job.finish() == 0, job.said()
    verify_up_to(last + 10, run)


@pytest.mark.timeout(1200)
def test_a_notice_that_comes_during_a_save(run: Run, cluster: Any):
    going, _ = add(cluster), add(cluster)
    job = run.start(0, 0, *KEYS, "workers=1..2")
    training(run, job, 2, more=25)
    wait_for("a save", job, lambda: any((run.out / "checkpoints").glob("*.part")))
    drain(cluster, going)
    training(run, job, 1)
    moved = starts(run)[-1]
    assert moved["reached"] == moved["step"], "steps were taken again although the notice came in time"
    cluster.remove_node(going, allow_graceful=False)
    verify_up_to(stop(run, job), run)


@pytest.mark.timeout(1200)
def test_a_run_goes_on_while_nodes_arrive_every_few_seconds(run: Run, cluster: Any):
    def last() -> int:
        lines = read_lines(run.out / "metrics.jsonl")
        return lines[-1]["step"] if lines else 0

    add(cluster)
    job = run.start(0, 0, *KEYS, "workers=1..3", "checkpoint.steps=1000000", "checkpoint.minutes=600")
    wait_for("the first step", job, lambda: last() > 0)
    before = len(starts(run))
    for _ in range(2):
        add(cluster)
        reached = last()
        wait_for("progress", job, lambda: last() >= reached + 40)  # noqa: B023
    assert len(starts(run)) - before <= 1, "the run began again for each node"
    wait_for("3 ranks training", job, lambda: read_lines(run.out / "starts.jsonl")[-1].get("ranks") == 3)
    began = read_lines(run.out / "starts.jsonl")[-1]["step"]
    wait_for("progress", job, lambda: last() >= began + 15)
    assert all(s["reached"] == s["step"] for s in starts(run)), f"steps were taken again: {starts(run)}"
    verify_up_to(stop(run, job), run)


@pytest.mark.timeout(1200)
def test_a_head_that_is_killed_and_comes_back(run: Run, cluster: Any, monkeypatch: pytest.MonkeyPatch):
    """The run ends with its head; the same command continues on the next one."""
    add(cluster)
    job = run.start(0, 0, *KEYS, "workers=1")
    training(run, job, 1, more=45)
    cluster.remove_node(cluster.head_node, allow_graceful=False)
    assert job.finish(300) != 0
    cluster.shutdown()
    with ray_cluster(monkeypatch) as again:
        add(again)
        last = int(read_lines(run.out / "metrics.jsonl")[-1]["step"]) + 30
        job = run.start(0, 0, *KEYS, "workers=1", f"max_steps={last}")
        assert job.finish() == 0, job.said()
    assert starts(run)[-1]["step"] >= 40, "it began at a checkpoint"
    verify_up_to(last, run)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", ["RayTrainWorker", NAME, "eagleray-spare"])
def test_a_process_that_hangs_is_replaced(run: Run, part: str, monkeypatch: pytest.MonkeyPatch):
    """It counts as dead after 15 seconds here."""
    monkeypatch.setenv("EAGLERAY_HANGING", "15")
    job = run.start(2, 0, *KEYS)
    job.wait_for(25)
    spare = part == "eagleray-spare"
    stopped = below(job.process, NAME if spare else part)[-1]
    for process in [psutil.Process(stopped).ppid()] * spare + [stopped]:  # it waits, and is missed with its rank alone
        os.kill(process, signal.SIGSTOP)
    wait_for("a second start", job, lambda: len(read_lines(run.out / "starts.jsonl")) > 1)
    began = read_lines(run.out / "starts.jsonl")[-1]["step"]
    # The second start may have cut all lines.
    wait_for("progress", job, lambda: any(x["step"] >= began + 15 for x in read_lines(run.out / "metrics.jsonl")))
    verify_up_to(stop(run, job), run)
