"""Commands and ranks as processes that begin at once: copies of a process that has imported PyTorch and done no more.

A copy of the tests' own process could not train: PyTorch refuses gradients in a copy of a process that has had them
computed while an accelerator was there, such as the simulated one."""

import gc
import inspect
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing import forkserver, popen_forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.multiprocessing as mp
from helpers import program

import eagleray
from eagleray.base.errors import Outage, UserError
from eagleray.engine import export

# A copy of a process lacks its threads; what waits for them when it is deleted, as in DuckDB, would end the copy.
os.register_at_fork(after_in_child=gc.freeze)
# Of the tests before any of them has begun; the process that is copied finds their helpers by it.
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
CONTEXT: Any = multiprocessing.get_context("forkserver")
SERVER: Any = forkserver._forkserver  # type: ignore[attr-defined]
CONTEXT.set_forkserver_preload(["helpers.forked", *program.IMPORTED])


def ensure_running() -> None:
    """Start the process that is copied, in the environment in which the tests began, whichever test needs it first."""
    with mock.patch.dict(os.environ, ENVIRONMENT, clear=True):
        forkserver.ForkServer.ensure_running(SERVER)


vars(SERVER)["ensure_running"] = ensure_running  # loader processes of tests are copies of the same process


class Popen(subprocess.Popen[Any]):
    """A Python program that runs as `subprocess.Popen` would run it, without the seconds in which it imports.

    Its command line is `[sys.executable, "-m", module, ...]`, or has `-c` and a program, or the path of one. What
    variables change as Python starts, such as its hash seed, and as packages are imported, is as in the tests."""

    _waitpid_lock: Any

    def _execute_child(self, *args: Any) -> None:
        given = inspect.signature(subprocess.Popen._execute_child).bind(self, *args).arguments  # type: ignore[attr-defined]
        refused = ("preexec_fn", "pass_fds", "shell", "gid", "gids", "uid", "start_new_session")
        assert not any(given[name] for name in refused), "only a process of its own can have that"
        group = None if given["process_group"] == -1 else given["process_group"]
        ends = [given["p2cread"], given["c2pwrite"], given["errwrite"]]
        files = [Connection(os.dup(number if end == -1 else end)) for number, end in enumerate(ends)]
        words = [os.fspath(word) for word in given["args"]]
        environment = dict(os.environ if given["env"] is None else given["env"])
        ready, begun = CONTEXT.Pipe(duplex=False)
        SERVER.ensure_running()
        work = (words, environment, os.fspath(given["cwd"] or os.getcwd()), group, files, check_export, begun)
        self._copy = popen_forkserver.Popen(CONTEXT.Process(target=program.run, args=work))  # type: ignore[attr-defined]
        self.pid = self._copy.pid
        self._child_created = True
        for end in (begun, *files):
            end.close()
        ready.poll(120)  # the process is in its group, or has ended
        ready.close()
        names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in names))  # type: ignore[attr-defined]

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                self.returncode = self._copy.poll()
            finally:
                self._waitpid_lock.release()
        return self.returncode

    def _try_wait(self, flags: int) -> tuple[int, int]:
        code = self._copy.poll(flags)
        return (0, 0) if code is None else (self.pid, code)

    def _handle_exitstatus(self, code: int, *_: Any) -> None:
        self.returncode = code


def run(
    words: Sequence[str | Path],
    *,
    capture_output: bool = False,
    check: bool = False,
    timeout: float | None = None,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run` of a Python program that begins at once. See `Popen`."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(words, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(words, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def check_export(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Check an export in a new process, as `eagleray.engine.export.run_check` does."""
    return run([sys.executable, "-c", export.CHECK, *arguments], capture_output=True, text=True)


def start_ranks(function: Callable[..., None], args: Sequence[Any], ranks: int = 2) -> None:
    """Call a function with the number of its rank and these arguments in a process for each rank, and wait for all.

    Raises the error of the first rank that fails, after the others are killed."""
    SERVER.ensure_running()
    mp.start_processes(partial(in_environment, dict(os.environ), function), args, ranks, start_method="forkserver")


def in_environment(environment: Mapping[str, str], function: Callable[..., None], *args: Any) -> None:
    """Call a function with the environment of the tests' process: the copied one has what was set when it began."""
    os.environ.clear()
    os.environ |= environment
    function(*args)


class Command:
    """`eagleray.pretrain` in a process of its own, on a machine of its own whose clock may be wrong."""

    def __init__(
        self,
        recipe: Path,
        keys: Mapping[str, Any],
        out: str,
        machine: Path,
        *,
        begin: Callable[[], Any] = int,
        skew: float = 0.0,
    ) -> None:
        """`machine` is the folder of its caches, and `begin` is called in it first; `skew` is in seconds."""
        SERVER.ensure_running()
        self._end, end = CONTEXT.Pipe(duplex=False)
        self.process = CONTEXT.Process(target=_run, args=(recipe, dict(keys), out, machine, begin, skew, end))
        self.process.start()
        end.close()

    def send(self, number: int) -> None:
        assert self.process.pid
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def outcome(self, seconds: float = 120) -> str:
        """Return "done", "stopped" or the one line of an error."""
        assert self._end.poll(seconds), "the command goes on"
        text = self._end.recv()
        self.process.join(seconds)
        return str(text)


def _run(
    recipe: Path, keys: dict[str, Any], out: str, machine: Path, begin: Callable[[], Any], skew: float, end: Any
) -> None:
    os.environ["XDG_CACHE_HOME"] = str(machine)
    honest = time.time
    time.time = lambda: honest() + skew
    torch.set_num_threads(1)  # as in the tests' process, whose bits these are to have
    begin()
    try:
        end.send("done" if eagleray.pretrain(recipe, keys, out=out, workers=0).finished else "stopped")
    except (UserError, Outage) as e:
        end.send(f"{type(e).__name__}: {e}")
    except BaseException as e:
        end.send(f"raw {type(e).__name__}: {e}")
    end.close()
    os._exit(0)  # what the tests' process has open is not this one's to close
