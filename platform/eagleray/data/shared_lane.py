"""Passes the blocks of a lane from the reader that fetches them to the readers that share the lane.

One reader of a rank leads a lane: it fetches each block once and puts it into shared memory. The other readers wait for
the block and map the same memory. The kernel frees this memory when no process uses it any more, also when all are
killed."""

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

WAIT = 5.0  # seconds between checks that the other processes are alive
SOON = 0.1  # seconds between these checks at the end
LEADER, FAILED = -2, -1  # sent in place of a block's index: with the leader's process id; with the error that ended it


class SharedLane:
    """The queues of a lane, one for each reader of the rank except the leader."""

    def __init__(self, leader: int, readers: int) -> None:
        self.leader, self.ended = leader, fork_server.CONTEXT.Semaphore(0)
        self.queues: dict[int, Any] = {r: fork_server.CONTEXT.Queue() for r in range(readers) if r != leader}

    def end_of(self, reader: int) -> "Leader | Follower":
        """Return the object that gets the lane's blocks for a reader."""
        if reader == self.leader:
            return Leader(list(self.queues.values()), self.ended)
        return Follower(self.queues[reader], self.ended)


class Leader:
    """Fetches the blocks of a lane, and passes each to the other readers of the lane."""

    pool: Pool | None = None  # None: the pool of the fetcher is used

    def __init__(self, queues: list[Any], ended: Any) -> None:
        """`ended` is a semaphore that each other reader releases when it ends."""
        self.queues, self.ended = queues, ended
        for queue in queues:
            queue.cancel_join_thread()  # at exit, do not wait for a reader that has ended
        self._pass(LEADER, os.getpid())

    def get(self, number: int, fetch: Callable[[], Content]) -> Content:
        """Fetch block `number` of the lane, counted from the readers' first, pass it to the others and return it."""
        try:
            begin, data, wrong = fetch()
        except (UserError, Outage) as e:
            self._pass(number, e)
            raise
        shared = _shared_copy(data)
        self._pass(number, (begin, shared, wrong))
        return Content(begin, memoryview(shared.numpy()), wrong)  # type: ignore[arg-type]

    def fail(self, error: Exception) -> None:
        """Tell the other readers that no more blocks will come."""
        self._pass(FAILED, error)

    def finish(self, over: Any) -> None:
        """Wait until the other readers have ended, or the event `over` is set: they can open the shared memory of this
        process only while the process lives."""
        parent = parent_process()
        for _ in self.queues:
            while not self.ended.acquire(timeout=SOON):
                if over.is_set() or not (parent is None or parent.is_alive()):
                    return

    def _pass(self, number: int, item: Any) -> None:
        for queue in self.queues:
            queue.put((number, item))  # needs no limit, as the leader is at most a few steps ahead


class Follower:
    """Waits for the blocks that the leader of the lane fetches."""

    def __init__(self, queue: Any, ended: Any) -> None:
        self.queue, self.ended = queue, ended
        self.pool = Pool(1)  # one thread, as blocks come one after the other
        self.early: dict[int, Any] = {}  # items that came before they were asked for
        self.over: Exception | None = None

    def fail(self, error: Exception) -> None:
        """Do nothing, as nobody waits for this reader."""

    def finish(self, over: Any) -> None:
        """Tell the leader that this reader has ended, and takes no more blocks."""
        self.ended.release()

    def get(self, number: int, fetch: Callable[[], Content]) -> Content:
        """Return block `number` of the lane. Raises the leader's error, and RuntimeError when the training process or
        the leader is dead."""
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
                leader = self.early.get(LEADER, os.getpid())  # an unknown leader counts as alive
                if not (parent is None or parent.is_alive()) or not psutil.pid_exists(leader):
                    raise RuntimeError("the training process or a loader process has died") from None


def _shared_copy(data: memoryview) -> torch.Tensor:
    shared = shared_memory(len(data))
    shared.numpy()[:] = np.frombuffer(data, np.uint8)
    return shared


def shared_memory(size: int) -> torch.Tensor:
    """Return unnamed shared memory (size,) for several processes. Nothing is left of it when all of them are killed."""
    storage = torch.UntypedStorage._new_shared(size)
    return torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload, no-any-return]
