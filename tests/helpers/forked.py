"""Commands and ranks as processes that begin at once: copies of a process that has imported PyTorch and done no more.

A copy of the tests' own process could not train: PyTorch refuses gradients in a copy of a process that has had them
computed while an accelerator was there, such as the simulated one."""

import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

import eagleray
from eagleray.base.errors import Outage, UserError

CONTEXT: Any = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["eagleray.api.pretrain", "eagleray.runs.pretrain"])


def start_ranks(function: Callable[..., None], args: Sequence[Any], ranks: int = 2) -> None:
    """Call a function with the number of its rank and these arguments in a process for each rank, and wait for all.

    Raises the error of the first rank that fails, after the others are killed."""
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
