"""Ranks that train in forked processes, without Ray: what is killed ends with the bits of what is not."""

import os
import signal
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as td
from helpers.runs import assert_same, weights

from eagleray import config
from eagleray.base.files import read_lines
from eagleray.cluster import supervisor
from eagleray.cluster.spares import NAME, Spare
from eagleray.cluster.supervisor import Supervisor
from eagleray.runs import recipe
from eagleray.runs.sources import resolve_paths
from eagleray.runs.tracking import Tracking

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
KEYS = ["optim.epochs=40", "max_steps=40", "evaluate.probe_epochs=0", "checkpoint.steps=9", "log_steps=1"]


class Worker:
    """A worker without Ray."""

    def __init__(self) -> None:
        self.shown: list[int] = []
        self.failures: list[dict[str, Any]] = []

    def warned(self) -> bool:
        return False

    def show(self, record: Mapping[str, Any], steps: int) -> None:
        self.shown.append(record.get("step", 0))

    def fail(self, failure: dict[str, Any]) -> None:
        self.failures.append(failure)

    def count(self, failure: dict[str, Any]) -> bool:
        raise AssertionError(failure)


def train(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch, harm: Callable[[list[Spare]], None]
) -> tuple[list[Any], Worker]:
    """Train two ranks while they are harmed. Returns what they return, and what their worker was told."""
    server, worker = td.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), Worker()
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port), "WORLD_SIZE": "2"}
    spares = []
    for rank in range(2):
        for name, value in (address | {"RANK": str(rank), "OMP_NUM_THREADS": "1"}).items():
            monkeypatch.setenv(name, value)
        spares.append(Spare(supervisor.PROCESS))

    def follow(rank: int) -> Any:
        store = td.TCPStore("127.0.0.1", server.port, is_master=False)
        return Supervisor(spares[rank], store, rank, 2, worker).run(given)

    with ThreadPoolExecutor(2) as threads:
        try:
            results = [threads.submit(follow, rank) for rank in range(2)]
            harm(spares)
            return [result.result(300) for result in results], worker
        finally:
            for spare in spares:
                spare.process.kill()
                spare.process.wait()


def given_to(small: Path, shards: Path, out: Path) -> dict[str, Any]:
    keys = [f"data.train={shards / 'train'}", f"data.test={shards / 'test'}", f"out={out}", *KEYS]
    plain = config.to_plain(resolve_paths(recipe.load(str(small), keys)))
    tracking = Tracking(f"sqlite:///{out}.db")
    run = {"recipe": plain, "plugins": {}, "tracking": tracking, "command": "a"}
    return run | {"cpus": 1, "timeout": 120, "device": "cpu"}


def wait_for(come: Callable[[], bool]) -> None:
    end = time.monotonic() + 300
    while not come():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_killed_rank_continues_with_equal_bits(
    small: Path, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "PAUSE", 0.0)
    harmed, whole = tmp_path / "harmed", tmp_path / "whole"

    def steps() -> int:
        lines = read_lines(harmed / "metrics.jsonl")
        return lines[-1]["step"] if lines else 0

    def kill(spares: list[Spare]) -> None:
        for start, (rank, step) in enumerate([(1, 12), (0, 24)], 2):
            wait_for(lambda step=step: steps() >= step)  # type: ignore[misc]
            [process] = [p for p in psutil.Process(spares[rank].process.pid).children() if p.name() == NAME]
            os.kill(process.pid, signal.SIGKILL)
            killed = time.monotonic()
            wait_for(lambda start=start: len(read_lines(harmed / "starts.jsonl")) == start)  # type: ignore[misc]
            print(f"rank {rank} killed at step {steps()}: began again after {time.monotonic() - killed:.1f} s")

    results, worker = train(given_to(small, shards, harmed), monkeypatch, kill)
    assert results[0]["restarts"] == 2
    assert max(worker.shown) == 40
    assert [line["step"] for line in read_lines(harmed / "metrics.jsonl")] == list(range(1, 41))
    text = (harmed / "train.log").read_text()
    assert "started again: the process of rank 1 was ended by signal 9" in text
    assert "started again: the process of rank 0 was ended by signal 9" in text
    train(given_to(small, shards, whole), monkeypatch, lambda spares: None)
    assert_same(weights(harmed), weights(whole))


def test_an_error_of_the_user_ends_all_ranks(
    small: Path, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = given_to(small, shards, tmp_path / "out")
    given["recipe"]["data"]["train"] = [str(tmp_path / "none")]
    results, worker = train(given, monkeypatch, lambda spares: None)
    assert results == [None, None]
    assert "none" in worker.failures[0]["why"]
    assert worker.failures[0]["user"]
