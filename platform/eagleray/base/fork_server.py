"""The server that loader processes are forked from.

It has imported what they need and has no threads: in a process that is forked while another thread holds a lock, that
lock is held for good.
"""

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
# Slurm, `timeout` and Ctrl-C send their signals to the group of the command, which first saves what was trained.
APART = f"import os, signal; os.setpgid(0, 0); signal.pthread_sigmask(signal.SIG_UNBLOCK, {[*map(int, child.STOPS)]}); "
_starting = threading.Lock()
_server: Any = forkserver._forkserver  # type: ignore[attr-defined]


def start(modules: Sequence[str]) -> None:
    """Start the server unless it runs, without waiting until it has imported these modules, of which some may be
    missing."""
    if _server._preload_modules == ["__main__"]:  # Python's own choice, so nobody else uses the server
        CONTEXT.set_forkserver_preload(list(modules))
    _start(util.spawnv_passfds)  # type: ignore[attr-defined]


def start_here() -> None:
    """Fork the server from this process, unless it runs. This process must have no threads.

    Processes that are forked from this one use the same server, and share the memory of what is imported."""
    CONTEXT.set_forkserver_preload([])
    vars(_server).pop("ensure_running", None)
    _start(_fork)
    # A forked process cannot ask whether the server has ended, which is no child of its own.
    vars(_server)["ensure_running"] = resource_tracker.ensure_running


def _start(execute: Callable[[Any, Sequence[str], Sequence[int]], int]) -> None:
    """Start the server, in a group of processes of its own, by a function that executes its command line."""

    def apart(python: Any, command: Sequence[str], descriptors: Sequence[int]) -> int:
        # Python 3.11 hands the server no path; without it a package that is not installed would not be imported.
        path = f"import sys; sys.path[:] = {sys.path}; "
        return execute(python, [*command[:-1], APART + path + command[-1]], descriptors)

    with _starting:
        resource_tracker.ensure_running()  # first, as it lets signals through that are held back
        with replaced(util, "spawnv_passfds", apart), child.without_stop_signals():
            _server.ensure_running()


def _fork(_: Any, command: Sequence[str], descriptors: Sequence[int]) -> int:
    """Run a command line of Python, whose last word is the program, in a fork of this process that has only these
    descriptors."""
    if process := os.fork():
        return process
    try:
        kept = [2, *sorted(descriptors), os.sysconf("SC_OPEN_MAX")]
        for before, after in itertools.pairwise(kept):
            os.closerange(before + 1, after)
        exec(command[-1], {})
    finally:
        os._exit(0)
