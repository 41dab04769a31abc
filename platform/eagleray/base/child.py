"""Runs helper processes that survive signals meant for their parent, and end when their parent has ended."""

import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eagleray.base.contexts import on_error
from eagleray.base.errors import Outage, UserError

STOPS = (signal.SIGINT, signal.SIGTERM)  # sent to a whole process group by Ctrl-C, `timeout` and Slurm
PYTHON = (sys.executable, "-c")

# Code put before a Python program: a thread kills the process when its parent has ended. Argument 1 is the parent's id.
WATCH = """
def _watch():
    import os, signal, sys, threading, time
    parent = int(sys.argv.pop(1))
    def end():
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=end, daemon=True).start()
_watch()
"""


def run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[Any]:
    """Run a command as `subprocess.run` does, but in a process group of its own and with SIGINT and SIGTERM blocked. An
    error while waiting for the command, such as a timeout, kills the command."""
    with without_stop_signals():
        process = subprocess.Popen(command, process_group=0, **_pipes(options))
    with process, on_error(process.kill):
        out, err = process.communicate(options.get("input"), options.get("timeout"))
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    if options.get("check"):
        done.check_returncode()
    return done


def run_python(
    code: str, arguments: Sequence[str], python: Sequence[str] = PYTHON, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """Run a Python program with arguments in a new process, which also ends when this process dies."""
    return run([*python, WATCH + code, str(os.getpid()), *arguments], **options)


def call(function: str, *arguments: Any) -> Any:
    """Call a function, given as `module:name`, in a new process and return the result. What it imports is freed when
    the process ends. Raises the function's UserError, Outage or RuntimeError, and RuntimeError if the process dies."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "answer"
        program = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve()"
        given = pickle.dumps((function, arguments, sys.argv))
        done = run_python(program, [str(path)], input=given, stdout=None, stderr=None)
        if not path.exists():
            raise RuntimeError(f"the process of {function} ended with status {done.returncode}")
        answer, error = pickle.loads(path.read_bytes())
    if error:
        raise error
    return answer


def serve() -> None:
    """Call the function pickled on standard input, and pickle its result or error to the file that argument 1 names."""
    path = Path(sys.argv[1])
    function, arguments, sys.argv = pickle.load(sys.stdin.buffer)  # the function sees the user's command line
    module, _, name = function.partition(":")
    answer: tuple[Any, Exception | None]
    try:
        answer = getattr(importlib.import_module(module), name)(*arguments), None
    except (UserError, Outage, RuntimeError) as e:  # other errors are bugs and print a traceback
        answer = None, e
    path.write_bytes(pickle.dumps(answer))


def words(done: subprocess.CompletedProcess[str]) -> str:
    """Return why a process failed: the last line of its stderr. If it wrote none, or a signal ended it: its status."""
    said = done.stderr.strip().splitlines() if done.returncode > 0 else []
    return said[-1] if said else f"its process ended with status {done.returncode}"


@contextmanager
def without_stop_signals() -> Iterator[None]:
    """A context in which this thread blocks SIGINT and SIGTERM. Processes started in it inherit the blocked signals and
    keep them blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _pipes(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of `subprocess.Popen` for the options of `run`. By default stdout and stderr are captured."""
    given = {k: v for k, v in options.items() if k not in ("input", "timeout", "check")}
    pipes = {"stdin": subprocess.PIPE if "input" in options else subprocess.DEVNULL}
    return pipes | {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | given
