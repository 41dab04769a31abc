"""Runs helper processes that neither die of a signal which their parent only notes, nor outlive their parent."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

STOPS = (signal.SIGINT, signal.SIGTERM)  # what Ctrl-C, `timeout` and Slurm send to a whole group of processes
PYTHON = (sys.executable, "-c")

# The beginning of a program: a thread ends the process once its parent, whose number is the first argument, has gone.
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
    """Run a command as `subprocess.run` does, in a group of its own and deaf to the signals that ask to stop. It is
    killed when this process stops to wait for it."""
    with held():
        process = subprocess.Popen(command, process_group=0, **_pipes(options))
    with process:
        try:
            out, err = process.communicate(options.get("input"), options.get("timeout"))
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    if options.get("check"):
        done.check_returncode()
    return done


def run_python(
    code: str, arguments: Sequence[str], python: Sequence[str] = PYTHON, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """Run a program of Python with its arguments in a new process, which also ends when this one dies."""
    return run([*python, WATCH + code, str(os.getpid()), *arguments], **options)


def words(done: subprocess.CompletedProcess[str]) -> str:
    """Return why a process failed: the last line of its errors. A signal leaves none."""
    said = done.stderr.strip().splitlines() if done.returncode > 0 else []
    return said[-1] if said else f"its process ended with status {done.returncode}"


@contextmanager
def held() -> Iterator[None]:
    """A context in which this thread holds back the signals that ask to stop. The processes that it starts hold them
    back for good, from their first moment on."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _pipes(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of `subprocess.Popen` for those of `run`, which always returns output and errors."""
    given = {k: v for k, v in options.items() if k not in ("input", "timeout", "check")}
    pipes = {"stdin": subprocess.PIPE if "input" in options else subprocess.DEVNULL}
    return pipes | {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | given
