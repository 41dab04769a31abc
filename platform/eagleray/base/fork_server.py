"""The server process from which loader processes are forked.

It has already imported their modules. It has no threads: if another thread held a lock at the time of a fork, the lock
would stay locked in the new process for ever."""

import itertools
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing import forkserver, resource_tracker, util
from typing import Any

from eagleray.base import child
from eagleray.base.contexts import replaced

CONTEXT: Any = multiprocessing.get_context("forkserver")
# Python code that the server runs first. It leaves the command's process group, so that Slurm, `timeout` and Ctrl-C do
# not end it before the command has saved a checkpoint.
APART = f"import os, signal; os.setpgid(0, 0); signal.pthread_sigmask(signal.SIG_UNBLOCK, {[*map(int, child.STOPS)]}); "
_starting = threading.Lock()
_server: Any = forkserver._forkserver  # type: ignore[attr-defined]


def start(modules: Sequence[str]) -> None:
    """Start the server, which imports `modules`, unless it runs. This call does not wait for the imports."""
    if _server._preload_modules == ["__main__"]:  # Python's default: no other code has set modules
        CONTEXT.set_forkserver_preload(list(modules))
    _start(util.spawnv_passfds)  # type: ignore[attr-defined]


def start_here() -> None:
    """Fork the server from this process, unless it runs. This process must have no threads.

    Processes forked from this one use the same server, and share the memory of imported modules."""
    CONTEXT.set_forkserver_preload([])
    vars(_server).pop("ensure_running", None)
    _start(_fork)
    # Forked processes inherit this. Python's own check whether the server runs would fail: it is not their child.
    vars(_server)["ensure_running"] = resource_tracker.ensure_running


def _start(execute: Callable[[Any, Sequence[str], Sequence[int]], int]) -> None:
    """Start the server in its own process group. `execute` runs its command line, in a new process or in a fork."""

    def apart(python: Any, command: Sequence[str], descriptors: Sequence[int]) -> int:
        # Python 3.11 does not pass sys.path to the server, which then could not import a package that is not installed.
        path = f"import sys; sys.path[:] = {sys.path}; "
        return execute(python, [*command[:-1], APART + path + command[-1]], descriptors)

    with _starting:
        resource_tracker.ensure_running()  # first, as it unblocks the signals that the next line blocks
        with replaced(util, "spawnv_passfds", apart), child.without_stop_signals():
            _server.ensure_running()


def _fork(_: Any, command: Sequence[str], descriptors: Sequence[int]) -> int:
    """Run a Python command line, whose last word is the program, in a fork of this process. Only the file descriptors
    given and stderr stay open."""
    if process := os.fork():
        return process
    try:
        kept = [2, *sorted(descriptors), os.sysconf("SC_OPEN_MAX")]
        for before, after in itertools.pairwise(kept):
            os.closerange(before + 1, after)
        exec(command[-1], {})
    finally:
        os._exit(0)
