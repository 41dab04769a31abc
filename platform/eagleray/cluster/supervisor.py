"""Supervise the process that trains one rank, and restart the processes of all ranks when one dies, fails or hangs.

Each worker of Ray Train supervises one training process. The workers agree through a key-value store in rank 0's
worker. For each attempt it holds why the attempt ended, and how many processes are done and how many have ended."""

import itertools
import logging
import os
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch.distributed as td

from eagleray.base.devices import is_accelerator
from eagleray.base.errors import Outage, Preempted, Superseded, UserError
from eagleray.cluster.failure import TIMES, count, fail, failure_of
from eagleray.cluster.prometheus import Gauges
from eagleray.cluster.resize import asked_to_save, note_saved
from eagleray.cluster.spares import ENDED, HANGING, Spare
from eagleray.runs import layout

log = logging.getLogger(__name__)
PROCESS = (
    "eagleray.cluster.rank_process:train"  # the function that forked processes run; only the spare process imports it
)
LOOK = 0.2  # largest number of seconds between two reads of the store
NOTICE = 1.0  # seconds a process gets to end by itself when another rank has died
LEAVE = 10.0  # seconds a process gets to end when all are done, or when it was killed
BRIEF = 20.0  # seconds below which an attempt is brief; the pause grows with the number of brief ones in a row
PAUSE = 10.0  # longest pause in seconds before the next attempt
NEVER = float("inf")

# Words of messages. A training process may send SHOW and FAIL, and ends with one of the first line; its worker sends
# WARNED and GO.
DONE, PREEMPTED, SUPERSEDED, FAILED = "done", "preempted", "superseded", "failed"
WARNED, SHOW, FAIL, GO = "warned", "show", "fail", "go"


class Ending(NamedTuple):
    """The end of this rank's part of an attempt: the last word of its process, and the values sent with it."""

    word: str
    value: Any = None
    failure: dict[str, Any] | None = None  # the record of an error, stored if the run fails because of it


class Supervisor:
    """Repeats attempts to train a rank until an attempt ends the run."""

    def __init__(self, spare: Spare, store: td.Store, rank: int, size: int, worker: "RayWorker") -> None:
        self.spare, self.store, self.rank, self.size, self.worker = spare, store, rank, size, worker

    def run(self, *arguments: Any) -> Any:
        """Return the result of the process when all ranks are done, or None when the run has failed for good.

        The process gets the number of the attempt, why the previous one ended, and `arguments`. Raises Preempted and
        Superseded when the process does, and RuntimeError or DistError when Ray has to restart all workers."""
        brief, why = 0, ""
        for attempt in itertools.count(1):
            began = time.monotonic()
            self.spare.fork(attempt, why, *arguments)
            ending = Following(self, attempt).end()
            if ending.word == DONE:
                return ending.value
            if ending.word == PREEMPTED:
                raise Preempted(ending.value)
            if ending.word == SUPERSEDED:
                raise Superseded(ending.value)
            self._meet(attempt, "gone")
            why = self.store.get(f"{attempt}/over").decode()
            self._count(ending, why)
            self._meet(attempt, "counted")
            if self.store.check([FAIL]):
                return None
            log.warning("attempt %d is over: %s", attempt, why)
            brief = brief + 1 if time.monotonic() - began < BRIEF else 0
            time.sleep(pause(brief))
        raise AssertionError("unreachable")

    def _count(self, ending: Ending, why: str) -> None:
        """Count this rank's error if it is the reason `why` that ended the attempt. Errors from a lost connection to a
        process that died do not count: if machines come and go, there may be many between two checkpoints."""
        if ending.failure is None or ending.value != why or self.store.check([FAIL]):
            return
        if self.worker.count(ending.failure):
            self.store.set(FAIL, str(self.rank))

    def _meet(self, attempt: int, where: str) -> None:
        """Wait until all ranks have reached a point of the attempt. `where` is "gone", when their processes have ended
        and all reasons are stored, or "counted", when an error has been counted."""
        self.store.add(f"{attempt}/{where}", 1)
        while self.store.add(f"{attempt}/{where}", 0) < self.size:
            time.sleep(LOOK / 4)


def pause(brief: int) -> float:
    """Return the seconds to wait before the next attempt, after `brief` attempts in a row shorter than BRIEF."""
    return min(2.0**brief - 1, PAUSE)


class Following:
    """One attempt of one rank, from the fork of its process to the end of that process.

    In the key-value store, a rank counts itself as done or writes why the attempt is over, so that all ranks agree."""

    def __init__(self, supervisor: Supervisor, attempt: int) -> None:
        self.spare, self.store, self.worker = supervisor.spare, supervisor.store, supervisor.worker
        self.rank, self.size, self.attempt = supervisor.rank, supervisor.size, attempt
        self.heard = time.monotonic()
        self.kill_at = self.killed = NEVER
        self.last: Ending | None = None
        self.status: int | None = None  # the exit status of the process, once it has ended
        self.warned = False

    def end(self) -> Ending:
        """Follow the process until its end, and return how it ended. Raises RuntimeError when a kill has no effect."""
        while True:
            for word, *values in self.spare.hear(LOOK):
                self.heard = time.monotonic()
                self._take(word, values)
            ending = self._look()
            if ending and self.status is not None:
                return ending
            if self.status is None and (now := time.monotonic()) >= self.kill_at:
                self.spare.kill()
                self.killed = min(self.killed, now)
                if now > self.killed + LEAVE:  # the spare process hangs and cannot fork again
                    self.spare.give_up(LEAVE)

    def _look(self) -> Ending | None:
        """Check the store and the process. Returns how this attempt ended, or None if that is not known yet."""
        if self.last and self.last.word == DONE:
            return self._with_others(self.last)
        if self.status is not None:
            return self._ended(self.status)
        if self.kill_at == NEVER:
            self._watch()
        return None

    def _take(self, word: str, values: list[Any]) -> None:
        """Handle a word from the process, or the news of its end."""
        if word == ENDED:
            self.status = values[0]
        elif word == SHOW:
            self.worker.show(*values)
        elif word == FAIL:
            self.worker.fail(values[0])
            self.store.set(FAIL, str(self.rank))
        elif (
            word in (DONE, PREEMPTED, SUPERSEDED, FAILED) and self.kill_at > 0
        ):  # words sent after the kill are ignored
            self.last = Ending(word, *values)
            if word == DONE:
                self.store.add(self._key("done"), 1)
            elif word == FAILED:
                self._give_up(values[0])
            else:
                self._let_go()

    def _with_others(self, done: Ending) -> Ending | None:
        """Let the process end when all ranks are done. If another rank has to restart, kill it and return FAILED."""
        if self.store.add(self._key("done"), 0) == self.size:
            self._let_go()
            return done
        if self._over():
            self.kill_at = 0.0
            return Ending(FAILED)
        return None

    def _ended(self, status: int) -> Ending:
        """Return how the process ended. If it was not told to end, tell the other ranks that the attempt is over."""
        if self.last and self.last.word != FAILED:
            return self.last
        if self.kill_at == NEVER:  # this reason is the cause: other ranks only lost their connections to it
            how = f"by signal {-status}" if status < 0 else f"with status {status}"
            self.store.set(self._key("over"), f"the process of rank {self.rank} was ended {how}")
        return self.last or Ending(FAILED)

    def _watch(self) -> None:
        """Check whether the process has to be killed, and whether to tell it that the worker was warned."""
        if self._over():
            self.kill_at = time.monotonic() + NOTICE
        elif time.monotonic() - self.heard > HANGING:
            self._give_up(f"the process of rank {self.rank} gave no sign of life for {HANGING:.0f} s")
        elif not self.warned and self.worker.warned():
            self.warned = True
            self.spare.tell(WARNED)

    def _let_go(self) -> None:
        """Let the process end by itself within LEAVE seconds."""
        if self.kill_at == NEVER:
            self.spare.tell(GO)
            self.kill_at = time.monotonic() + LEAVE

    def _give_up(self, why: str) -> None:
        """End this attempt for all ranks, and kill the process. A reason that another rank has stored stays."""
        self.store.compare_set(self._key("over"), "", why)
        self.kill_at = 0.0

    def _over(self) -> bool:
        return bool(self.store.check([self._key("over")]))

    def _key(self, name: str) -> str:
        return f"{self.attempt}/{name}"


class RayWorker:
    """The interface of the Ray Train worker in which a supervisor runs: it takes warnings, metrics and failures."""

    def __init__(self, out: str, command: str, method: str, user: str) -> None:
        self.out, self.command, self.method, self.user = out, command, method, user
        self.gauges: Gauges | None = None

    def warned(self) -> bool:
        """Return whether the run has to save because a machine is preempted or added."""
        # `ray.train.get_preemption_info` would wait for all workers, but one may have no training process just now.
        from ray.train.v2._internal.execution.context import get_train_context

        return get_train_context().preemption_context.preemption_info is not None or asked_to_save()

    def show(self, record: Mapping[str, Any], steps: int) -> None:
        """Export the metrics in a record through Ray."""
        self.gauges = self.gauges or Gauges(self.out, self.method, self.user, steps)
        self.gauges.update(record)

    def fail(self, failure: dict[str, Any]) -> None:
        """Store why the run has failed for good."""
        fail(self.out, self.command, failure)

    def count(self, failure: dict[str, Any]) -> bool:
        """Count an error that has ended an attempt. After TIMES such errors, store the failure and return True."""
        try:
            times = count(self.out, self.command)
        except (UserError, Outage, OSError) as e:
            log.warning("%s: an error cannot be counted: %s", self.out, e)
            return False
        if times >= TIMES:
            why = f"failed {times} times without progress: {failure['why']}; see {self.out}/{layout.LOG}"
            self.fail(failure | {"why": why})
        return times >= TIMES


def cpus_per_gpu(node: Mapping[str, float], least: float) -> float:
    """Return the number of CPUs for the processes of a worker with a GPU: its share of the machine `node`, or `least`
    if that is more. `least` is what the worker asked for, perhaps before any machine with GPUs was up."""
    return max(least, int(node.get("CPU", 0) / max(node.get("GPU", 1), 1)))


def supervise(given: dict[str, Any]) -> Any:
    """Train one rank. This function runs in every worker of Ray Train; when it raises, Ray restarts all workers.

    `RayWorker.fail` stores an error after which no restart can help: new workers then end; the command raises it."""
    import ray
    from ray.train.torch import get_device

    out, command = given["recipe"]["out"] or "", given["command"]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = td.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    if rank == 0:  # only rank 0 reads the failure, for all ranks
        store.set("failed before", str(int(failure_of(out, command) is not None)))
    if store.get("failed before") == b"1":
        return None
    spare = Spare(PROCESS)
    try:
        worker = RayWorker(out, command, given["recipe"]["method"]["name"], given["tracking"].user)
        device, cpus = get_device(), given["cpus"]
        if is_accelerator(device):
            own = ray.get_runtime_context().get_node_id()
            cpus = cpus_per_gpu(next(n["Resources"] for n in ray.nodes() if n["NodeID"] == own), cpus)
        return Supervisor(spare, store, rank, size, worker).run(given | {"device": str(device), "cpus": cpus})
    finally:
        note_saved()  # the run has saved, ended or failed: Ray need not wait before it starts other workers
        spare.close()
