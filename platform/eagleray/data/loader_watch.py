"""Watches loader processes that give nothing: names them in the log, and ends what stands still."""

import logging
from collections.abc import Collection
from multiprocessing.process import BaseProcess

import psutil

log = logging.getLogger(__name__)
NAMED = 30.0  # seconds without a batch after which the log says what the loader processes do
STOPPED = 120.0  # a process that is stopped for longer is given up
SLACK = 120.0  # beyond the time for which a store may be away, after which any other is


class LoaderWatch:
    """Follows the processes of one loader inside its `with`. What is stopped at the end is killed: it hears no other
    signal, and Python would wait for it when this process ends."""

    def __init__(self, processes: Collection[BaseProcess], patience: float) -> None:
        """`patience` is the number of seconds for which the store may be away."""
        self.processes, self.patience, self.named = processes, patience, False

    def __enter__(self) -> "LoaderWatch":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if _state(process) == psutil.STATUS_STOPPED:
                process.kill()

    def look(self, waited: float) -> None:
        """Warn when no batch has come for some seconds. Raises RuntimeError when none is to be expected any more."""
        if waited < NAMED:
            self.named = False
            return
        states = {p.pid: _state(p) for p in self.processes}
        line = "; ".join([f"no batch for {waited:.0f} s", *(f"loader process {p} is {s}" for p, s in states.items())])
        if not self.named:
            log.warning("%s", line)
            self.named = True
        limit = STOPPED if psutil.STATUS_STOPPED in states.values() else self.patience + SLACK
        if waited > limit:
            raise RuntimeError(line)


def _state(process: BaseProcess) -> str:
    try:
        return str(psutil.Process(process.pid).status())
    except psutil.Error:
        return "gone"
