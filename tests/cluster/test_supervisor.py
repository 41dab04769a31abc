"""Processes that are forked from one that waits, and that all ranks begin again when one of them dies."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as td
from helpers.processes import wait_for
from helpers.spare_work import begun

from eagleray.base.errors import Preempted
from eagleray.cluster import spares, supervisor
from eagleray.cluster.spares import NAME, Spare
from eagleray.cluster.supervisor import Following, Supervisor

pytestmark = pytest.mark.timeout(120)


class Worker:
    """A worker without Ray."""

    def __init__(self) -> None:
        self.leave = threading.Event()
        self.failures: list[dict[str, Any]] = []
        self.counted: list[str] = []

    def warned(self) -> bool:
        return self.leave.is_set()

    def show(self, record: Mapping[str, Any], steps: int) -> None:
        raise AssertionError

    def fail(self, failure: dict[str, Any]) -> None:
        self.failures.append(failure)

    def count(self, failure: dict[str, Any]) -> bool:
        self.counted.append(failure["why"])
        return len(self.counted) == 3


class Ranks:
    """Two ranks, each with a process that waits, and a thread that follows what is forked from it."""

    def __init__(self, folder: Path, spares: list[Spare]) -> None:
        self.folder, self.worker, self.spares = folder, Worker(), spares
        self.store = td.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.threads = ThreadPoolExecutor(2)

    def start(self, *plans: dict[int, str]) -> Any:
        """Begin; a rank does in an attempt what its plan says. Returns a function that waits for what they return."""

        def follow(rank: int) -> Any:
            store = td.TCPStore("127.0.0.1", self.store.port, is_master=False)
            return Supervisor(self.spares[rank], store, rank, 2, self.worker).run(self.folder, rank, plans[rank])

        results = [self.threads.submit(follow, rank) for rank in range(2)]
        return lambda: [result.result(60) for result in results]

    def begun(self, rank: int, attempt: int) -> tuple[int, int, str]:
        return begun(self.folder, rank, attempt)


@pytest.fixture(scope="module")
def waiting() -> Iterator[list[Spare]]:
    """Processes that wait, for one test after the other: each takes a second to start."""
    kept: list[Spare] = []
    yield kept
    for spare in kept:
        spare.close()


@pytest.fixture
def ranks(waiting: list[Spare], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    monkeypatch.setattr(supervisor, "PAUSE", 0.0)
    waiting += [Spare("helpers.spare_work:work") for _ in range(2 - len(waiting))]
    ranks = Ranks(tmp_path, list(waiting))
    yield ranks
    for spare in ranks.spares:
        if spare.forked or spare.line or spare.process.poll() is not None:
            waiting.remove(spare)
            spare.close()
    for attempt in range(1, 4):  # a rank whose other one has raised waits for it until Ray ends the worker
        ranks.store.add(f"{attempt}/gone", 2)
        ranks.store.add(f"{attempt}/counted", 2)
    ranks.threads.shutdown()


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let a rank's process count as one that has given no sign of life for as long as it takes."""
    followed: dict[int, Any] = {}

    class Noted(Following):
        silent = False

        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            followed[self.rank] = self

        def _watch(self) -> None:
            self.heard -= supervisor.HANGING if self.silent else 0
            super()._watch()

    def be_silent(rank: int) -> None:
        followed[rank].silent = True

    monkeypatch.setattr(supervisor, "Following", Noted)
    return be_silent


def wait_for_end(process: int) -> None:
    end = time.monotonic() + 60
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(process).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < end, "still there"
            time.sleep(0.02)


def stop(process: int) -> None:
    """Let a process stand still, and wait until it does."""
    os.kill(process, signal.SIGSTOP)
    while psutil.Process(process).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)


def test_all_ranks_begin_again_when_the_process_of_one_is_killed(ranks: Ranks) -> None:
    results = ranks.start({1: "with a child"}, {1: "with a child"})
    (first, below, why), (other, _, _) = ranks.begun(0, 1), ranks.begun(1, 1)
    assert why == ""
    assert psutil.Process(first).name() == NAME
    os.kill(other, signal.SIGKILL)
    again = ranks.begun(0, 2), ranks.begun(1, 2)
    assert {reason for _, _, reason in again} == {"the process of rank 1 was ended by signal 9"}
    assert results() == ["done in attempt 2", "done in attempt 2"]
    for process in first, other, below:
        wait_for_end(process)


def test_a_process_that_hangs_is_replaced(ranks: Ranks, silent: Callable[[int], None]) -> None:
    results = ranks.start({1: "stand still"}, {1: "stand still"})
    ranks.begun(0, 1)
    stop(ranks.begun(1, 1)[0])
    silent(1)
    assert ranks.begun(0, 2)[2] == "the process of rank 1 gave no sign of life for 45 s"
    assert results() == ["done in attempt 2", "done in attempt 2"]


def test_a_rank_that_is_done_waits_for_the_others_and_begins_again_with_them(ranks: Ranks) -> None:
    results = ranks.start({}, {1: "stand still"})
    done, _, _ = ranks.begun(0, 1)
    other = ranks.begun(1, 1)[0]
    wait_for(lambda: ranks.store.add("1/done", 0) == 1)
    time.sleep(3 * supervisor.LOOK)
    assert psutil.pid_exists(done), "the others may still talk to it"
    os.kill(other, signal.SIGKILL)
    assert results() == ["done in attempt 2", "done in attempt 2"]


def test_a_process_that_dies_when_its_rank_is_done_is_not_missed(ranks: Ranks) -> None:
    results = ranks.start({}, {1: "be done when told"})
    done, _, _ = ranks.begun(0, 1)
    ranks.begun(1, 1)
    wait_for(lambda: ranks.store.add("1/done", 0) == 1)
    os.kill(done, signal.SIGKILL)
    wait_for_end(done)
    ranks.worker.leave.set()
    assert results() == ["done in attempt 1", "done in attempt 1"]


def test_errors_and_exits_are_attempts_in_vain(ranks: Ranks) -> None:
    results = ranks.start({1: "fail", 2: "stand still"}, {1: "stand still", 2: "exit"})
    assert results() == ["done in attempt 3", "done in attempt 3"]
    assert ranks.begun(1, 2)[2] == "failed in attempt 1"
    assert ranks.begun(0, 3)[2] == "the process of rank 1 was ended with status 3"


def test_an_error_that_comes_back_ends_all_ranks_and_two_in_one_attempt_count_once(ranks: Ranks) -> None:
    always = dict.fromkeys(range(1, 4), "fail with an error")
    results = ranks.start(always, always)
    assert results() == [None, None]
    assert len(ranks.worker.counted) == 3
    assert set(ranks.worker.counted) <= {"error of rank 0", "error of rank 1"}


def test_an_error_of_a_rank_that_lost_one_that_was_killed_does_not_count(ranks: Ranks) -> None:
    """However often: machines that vanish are no error of the run."""
    lost = dict.fromkeys(range(1, 5), "miss the other")
    results = ranks.start(lost, dict.fromkeys(range(1, 5), "stand still"))
    for attempt in range(1, 5):
        os.kill(ranks.begun(1, attempt)[0], signal.SIGKILL)
    assert results() == ["done in attempt 5", "done in attempt 5"]
    assert ranks.begun(0, 5)[2] == "the process of rank 1 was ended by signal 9"
    assert ranks.worker.counted == []


def test_a_failure_that_no_attempt_mends_ends_all_ranks(ranks: Ranks) -> None:
    results = ranks.start({1: "fail"}, {1: "fail for good"})
    assert results() == [None, None]
    assert ranks.worker.failures == [{"user": True, "why": "no such key"}]


def test_processes_are_told_to_save_and_ray_starts_the_workers_again(ranks: Ranks) -> None:
    results = ranks.start({1: "be preempted"}, {1: "be preempted"})
    ranks.begun(0, 1)
    ranks.worker.leave.set()
    with pytest.raises(Preempted, match="preempted in attempt 1"):
        results()


def test_ray_starts_the_workers_again_when_the_process_that_waits_dies(ranks: Ranks) -> None:
    results = ranks.start({1: "stand still"}, {1: "stand still"})
    process = ranks.begun(0, 1)[0]
    ranks.begun(1, 1)
    ranks.spares[0].process.kill()
    with pytest.raises(RuntimeError, match="that training is forked from has ended"):
        results()
    ranks.spares[0].close()
    wait_for_end(process)
    ranks.spares[1].process.kill()


def test_ray_starts_the_workers_again_when_the_process_that_waits_hangs(
    ranks: Ranks, silent: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "LEAVE", 1.0)
    results = ranks.start({1: "with a child"}, {1: "stand still", 2: "stand still"})
    ranks.begun(1, 1)
    process, below, _ = ranks.begun(0, 1)
    for hung in ranks.spares[0].process.pid, process:
        stop(hung)
    silent(0)
    with pytest.raises(RuntimeError, match="that training is forked from gave no answer for 1 s"):
        results()
    for ended in process, below:
        wait_for_end(ended)
    ranks.spares[1].process.kill()


def test_a_process_that_waits_and_hangs_does_not_fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spares, "ANSWER", 1.0)
    spare = Spare("helpers.spare_work:work")
    try:
        spare.fork(1, "", tmp_path, 0, {1: "exit"})
        while not any(word == spares.ENDED for word, *_ in spare.hear(5)):
            pass
        os.kill(spare.process.pid, signal.SIGSTOP)
        with pytest.raises(RuntimeError, match="gave no answer for 1 s"):
            spare.fork(2, "", tmp_path, 0, {})
    finally:
        spare.close()


def test_what_trains_ends_with_its_worker(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys, time\n"
        "from eagleray.cluster.spares import Spare\n"
        "spare = Spare('helpers.spare_work:work')\n"
        "spare.fork(1, '', pathlib.Path(sys.argv[1]), 0, {1: 'with a child'})\n"
        "time.sleep(600)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    worker = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=environment)
    try:
        process, below, _ = begun(tmp_path, 0, 1)
        waiting = psutil.Process(process).ppid()
    finally:
        worker.kill()
        worker.wait()
    for ended in process, below, waiting:
        wait_for_end(ended)


@pytest.mark.slow
def test_the_process_that_waits_has_asked_no_device_and_begun_no_thread() -> None:
    """A fork survives neither: CUDA that was asked for its devices cannot be used below a fork."""
    code = (
        "import importlib, sys, threading, torch\n"
        "from eagleray.cluster.supervisor import PROCESS\n"
        "def asked(*_, **__): raise SystemExit('a device was asked for')\n"
        "torch.cuda.is_available = torch.cuda.device_count = torch.cuda.init = torch.cuda._lazy_init = asked\n"
        "torch.accelerator.is_available = torch.accelerator.device_count = asked\n"
        "torch.accelerator.current_accelerator = asked\n"
        "importlib.import_module(PROCESS.partition(':')[0])\n"
        "print(threading.active_count(), 'ray' in sys.modules)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stdout == "1 False\n", run.stderr


def test_attempts_that_fail_at_once_are_made_with_pauses() -> None:
    assert [supervisor.pause(brief) for brief in range(6)] == [0, 1, 3, 7, 10, 10]
