"""Keep a spare process that has imported everything, and fork the training processes from it.

Imports are most of the seconds that a new process takes to start; a forked process needs none. Threads and devices in
use do not survive a fork: the spare process has neither, while its worker has many threads. The spare process also
starts a fork server, a fork of itself, which forks the data loading processes of the training processes."""

import contextlib
import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

from eagleray.base import fork_server

BEAT = 1.0  # seconds between two heartbeats of a forked process
HANGING = 45.0  # seconds without a heartbeat after which a forked process counts as dead
PATIENCE = 10.0  # seconds to wait for the spare process to end before it is killed
IMPORT = 600.0  # timeout in seconds of the first fork, which waits for imports, perhaps from a slow network disk
ANSWER = 30.0  # timeout in seconds of later forks
ALIVE, ENDED = "alive", "ended"  # first words of the messages: heartbeat of a forked process, and its end
NAME = "eagleray-rank"  # `ps` and `top` show forked ranks under this name
Said = tuple[Any, ...]  # a message: a word and its values


class WorkerLine:
    """The forked process's end of the pipe to its worker.

    A thread sends a heartbeat every BEAT seconds, and kills this process and its children when the worker has ended."""

    def __init__(self, connection: "Connection[Any, Any]") -> None:
        self.connection, self.lock, self.words = connection, threading.Lock(), set[str]()
        self.heard = threading.Condition()
        threading.Thread(target=self._listen, name="line", daemon=True).start()

    def send(self, word: str, *values: Any) -> None:
        """Send a word and its values to the worker."""
        with self.lock:
            self.connection.send((word, *values))

    def told(self, word: str) -> bool:
        """Return whether the worker has sent this word."""
        return word in self.words

    def wait_for(self, word: str) -> None:
        """Wait until the worker sends a word."""
        with self.heard:
            self.heard.wait_for(lambda: word in self.words)

    def _listen(self) -> None:
        try:
            while True:
                if self.connection.poll(BEAT):
                    with self.heard:
                        self.words.add(self.connection.recv())
                        self.heard.notify_all()
                else:
                    self.send(ALIVE)
        except (EOFError, OSError):
            os.killpg(0, signal.SIGKILL)


class Spare:
    """The worker's handle for its spare process, and for the forked process, of which there is one at a time."""

    def __init__(self, target: str) -> None:
        """`target`, as `module:function`, names the function that forked processes call. Its arguments are the
        process's WorkerLine and the arguments of `fork`."""
        self.connection, theirs = multiprocessing.Pipe()
        end = theirs.fileno()
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve({end}, {target!r})"
        command = [sys.executable, "-c", code, "eagleray-spare"]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[end])
        theirs.close()
        self.line: Connection[Any, Any] | None = None
        self.forked = 0  # id of the forked process; 0 if there is none
        self.limit = IMPORT

    def fork(self, *arguments: Any) -> int:
        """Fork a process that calls the target, and return its id, after waiting until everything is imported. Raises
        RuntimeError when the spare process has ended or does not answer."""
        self.line, theirs = multiprocessing.Pipe()
        with self._alive(), theirs:
            self.connection.send_bytes(pickle.dumps(arguments))
            reduction.send_handle(self.connection, theirs.fileno(), self.process.pid)
            if not self.connection.poll(self.limit):
                self.give_up(self.limit)
            self.forked, self.limit = int(self.connection.recv()), ANSWER
        return self.forked

    def tell(self, word: str) -> None:
        """Send a word to the forked process, which may have ended."""
        if self.line:
            with contextlib.suppress(OSError):
                self.line.send(word)

    def kill(self) -> None:
        """Kill the forked process and its child processes, even if the spare process hangs."""
        _kill(self.forked)

    def give_up(self, seconds: float) -> NoReturn:
        """Kill the spare process, silent for `seconds`, and raise RuntimeError, so that Ray replaces the worker."""
        self.process.kill()
        raise RuntimeError(f"the process that training is forked from gave no answer for {seconds:.0f} s")

    def hear(self, seconds: float) -> list[Said]:
        """Return the messages that the forked process has sent, after waiting for at most `seconds`. When it has ended,
        the last message is ("ended", status), with status -N after signal N."""
        ends = [self.connection, self.line] if self.line else [self.connection]
        with self._alive():
            if self.connection not in wait(ends, seconds):
                return self._said()
            status = self.connection.recv()
        said = self._said()
        self.line, self.forked = None, 0
        return [*said, (ENDED, status)]

    def close(self) -> None:
        """End the spare process and the one forked from it."""
        self.connection.close()
        if self.line:
            self.line.close()
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _said(self) -> list[Said]:
        said: list[Said] = []
        try:
            while self.line and self.line.poll():
                said.append(self.line.recv())
        except (EOFError, OSError):
            self.line = None
        return said

    @contextlib.contextmanager
    def _alive(self) -> Any:
        """A context that turns a lost connection to the spare process into a RuntimeError."""
        try:
            yield
        except (EOFError, OSError) as e:
            raise RuntimeError(f"the process that training is forked from has ended: {self.process.poll()}") from e


def serve(descriptor: int, target: str) -> NoReturn:
    """Import the target, and fork a process that calls it each time the worker asks, until the worker has ended.

    This function runs in the spare process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command handles Ctrl-C and asks the run to stop
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # Ray starts its workers with some signals blocked
    worker: Connection[Any, Any] = Connection(descriptor)
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)
    gc.collect()
    gc.freeze()  # the garbage collector would write to shared pages, which copies them
    awake, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    process = 0
    while True:
        ready = wait([worker, awake])
        if awake in ready:
            os.read(awake, 4096)
            if process and os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                _kill(process)  # it has ended, but its child processes may hold its locks
                status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
                process = 0
                with contextlib.suppress(OSError):
                    worker.send(status)
        if worker in ready:
            try:
                asked = worker.recv_bytes()
                line = reduction.recv_handle(worker)
            except (EOFError, OSError):
                _kill(process)
                if process:
                    os.waitpid(process, 0)
                os._exit(0)
            fork_server.start_here()
            process = os.fork() or _run(function, asked, line, [worker.fileno(), awake, wake])
            os.close(line)
            with contextlib.suppress(ProcessLookupError, PermissionError):  # the child may have called setpgid first
                os.setpgid(process, process)
            worker.send(process)


def _kill(process: int) -> None:
    """Kill a forked process and its child processes, which are one process group. 0 stands for no process."""
    if process:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)


def _run(function: Callable[..., Any], asked: bytes, line: int, close: list[int]) -> NoReturn:
    """Call the function in the forked process with the pickled arguments `asked`, then end the process. `line` is the
    descriptor of its pipe to the worker; the descriptors in `close`, which belong to the spare process, are closed."""
    status = 1
    try:
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor in close:
            os.close(descriptor)
        with contextlib.suppress(OSError):
            Path("/proc/self/comm").write_text(NAME)
        function(WorkerLine(Connection(line)), *pickle.loads(asked))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
