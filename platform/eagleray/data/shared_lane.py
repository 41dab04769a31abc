"""Passes the blocks of a lane from the reader that fetches them to the readers that share the lane.

One reader of a rank leads a lane: it fetches each block once and puts it into shared memory. The others wait for the
block and map the same memory, which the kernel frees when the last of them has let go of it, also when all are killed.
"""

import os
from collections.abc import Callable
from multiprocessing import parent_process
from queue import Empty
from typing import Any

import numpy as np
import psutil
import torch

from eagleray.base import fork_server
from eagleray.base.errors import Outage, UserError
from eagleray.data.blocks import Content, Pool

WAIT = 5.0  # seconds between two looks whether the other processes are alive
SOON = 0.1  # the same at the end
LEADER, FAILED = -2, -1  # instead of the number of a block: the leader's process, and an error that ended it


class SharedLane:
    """The queues of a lane, one for each reader of the rank but the leader."""

    def __init__(self, leader: int, readers: int) -> None:
        self.leader, self.ended = leader, fork_server.CONTEXT.Semaphore(0)
        self.queues: dict[int, Any] = {r: fork_server.CONTEXT.Queue() for r in range(readers) if r != leader}

    def end_of(self, reader: int) -> "Leader | Follower":
        """Return what a reader fetches the lane's blocks with."""
        if reader == self.leader:
            return Leader(list(self.queues.values()), self.ended)
        return Follower(self.queues[reader], self.ended)


class Leader:
    """Fetches blocks, and passes each to the other readers of the lane."""

    pool: Pool | None = None  # the fetcher's pool

    def __init__(self, queues: list[Any], ended: Any) -> None:
        """`ended` counts the other readers that have ended."""
        self.queues, self.ended = queues, ended
        for queue in queues:
            queue.cancel_join_thread()  # a reader that has ended takes nothing more
        self._pass(LEADER, os.getpid())

    def get(self, number: int, fetch: Callable[[], Content]) -> Content:
        """Return the lane's block `number`, counted from where the readers began."""
        try:
            begin, data, wrong = fetch()
        except (UserError, Outage) as e:
            self._pass(number, e)
            raise
        shared = _shared_copy(data)
        self._pass(number, (begin, shared, wrong))
        return Content(begin, memoryview(shared.numpy()), wrong)  # type: ignore[arg-type]

    def fail(self, error: Exception) -> None:
        """Let the others know that no more blocks will come."""
        self._pass(FAILED, error)

    def finish(self, over: Any) -> None:
        """Wait until the other readers have ended, or the event `over` is set: what is shared can be taken only while
        this process lives."""
        parent = parent_process()
        for _ in self.queues:
            while not self.ended.acquire(timeout=SOON):
                if over.is_set() or not (parent is None or parent.is_alive()):
                    return

    def _pass(self, number: int, item: Any) -> None:
        for queue in self.queues:
            queue.put((number, item))  # the queue needs no limit, as the leader is at most a few steps ahead


class Follower:
    """Waits for the blocks that the leader of the lane fetches."""

    def __init__(self, queue: Any, ended: Any) -> None:
        self.queue, self.ended = queue, ended
        self.pool = Pool(1)  # one block after the other
        self.early: dict[int, Any] = {}  # blocks that overtook one
        self.over: Exception | None = None

    def fail(self, error: Exception) -> None:
        """Nobody waits for this reader."""

    def finish(self, over: Any) -> None:
        """Let the leader know that this reader takes nothing more."""
        self.ended.release()

    def get(self, number: int, fetch: Callable[[], Content]) -> Content:
        """Return the lane's block `number`. Raises the error that the leader met, and RuntimeError when the training
        process or the leader has died."""
        while number not in self.early:
            if self.over:
                raise self.over
            position, item = self._next()
            if position == FAILED:
                self.over = item
            else:
                self.early[position] = item
        item = self.early.pop(number)
        if isinstance(item, Exception):
            raise item
        begin, shared, wrong = item
        return Content(begin, memoryview(shared.numpy()), wrong)

    def _next(self) -> tuple[int, Any]:
        parent = parent_process()
        while True:
            try:
                return self.queue.get(timeout=WAIT)  # type: ignore[no-any-return]
            except Empty:
                leader = self.early.get(LEADER, os.getpid())  # one that is not known yet is taken for alive
                if not (parent is None or parent.is_alive()) or not psutil.pid_exists(leader):
                    raise RuntimeError("the training process or a loader process has died") from None


def _shared_copy(data: memoryview) -> torch.Tensor:
    shared = shared_memory(len(data))
    shared.numpy()[:] = np.frombuffer(data, np.uint8)
    return shared


def shared_memory(size: int) -> torch.Tensor:
    """Return bytes (size,) that processes can share. They have no name, so that nothing is left of them when all
    processes are killed."""
    storage = torch.UntypedStorage._new_shared(size)
    return torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload, no-any-return]
