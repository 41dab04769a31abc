"""Starts loader processes, sends them their data set, relays their logs, and reports those that hang."""

import errno
import io
import itertools
import logging
import logging.handlers
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from types import ModuleType
from typing import Any, Literal, TypeVar

import psutil
import torch
from torch.utils.data import DataLoader, IterableDataset

from eagleray.base import fork_server
from eagleray.base.errors import Outage, UserError
from eagleray.config import plugins
from eagleray.config.plugins import Sources
from eagleray.data.shared_lane import shared_memory

log = logging.getLogger(__name__)
T = TypeVar("T")
IMPORTED = ("eagleray.data.loader", "boto3")  # modules that loader processes need
LEFT = 2  # CPUs left to the training process and its threads, which dispatch the model's operations
SHARED = "/dev/shm"  # shared memory that loader processes pass their results in
OF_PROCESS = "in DataLoader worker process"  # words by which PyTorch marks an error of a loader process
SAID = 200  # most characters of an error of a loader process
NAMED = 30.0  # seconds without a batch after which the states of loader processes are logged
STOPPED = 120.0  # seconds without a batch after which the run ends if a loader process is suspended
SLACK = 120.0  # seconds that a batch may take beyond those for which a store may be unavailable
ALIGNED = 64  # bytes; shared arrays begin at multiples of it

_starting = threading.Lock()


def processes(asked: int | Literal["auto"], cpus: float) -> int:
    """Return the number of loader processes of a rank with `cpus` CPUs. "auto" leaves LEFT of the CPUs to training."""
    return max(int(cpus) - LEFT, 1) if asked == "auto" else asked


def start_server() -> None:
    """Start the server that loader processes are forked from, unless it runs. The server imports IMPORTED."""
    fork_server.start(IMPORTED)


@contextmanager
def loaded(
    dataset: IterableDataset[T], workers: int, **options: Any
) -> Iterator[tuple[Iterator[T], Collection[BaseProcess]]]:
    """A context in which loader processes, or this process if `workers` is 0, iterate over a data set. Its value is an
    iterator over the items, and the loader processes. `options` are those of PyTorch's DataLoader."""
    if not workers:
        yield _explained(DataLoader(dataset, batch_size=None, **options)), ()
        return
    start_server()
    others = multiprocessing.active_children()
    with in_one_line(), _without_main():
        records = fork_server.CONTEXT.Queue()
        options |= {"multiprocessing_context": fork_server.CONTEXT, "worker_init_fn": partial(_begin, records)}
        items = iter(DataLoader(_Sent(dataset), batch_size=None, num_workers=workers, **options))
    processes = set(multiprocessing.active_children()).difference(others)
    listener = logging.handlers.QueueListener(records, _Relay())
    listener.start()
    try:
        yield _explained(items), processes
    finally:
        del items
        if not sys.is_finalizing():  # at exit, `stop` would wait for a thread that cannot start any more
            listener.stop()


@contextmanager
def _without_main() -> Iterator[None]:
    """A context in which new processes do not run the user's script again, as Python would make them do."""
    with _starting:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


class _Sent(IterableDataset[T]):
    """A data set that is sent to loader processes with this process's environment and plug-ins. All these processes
    share the memory of its arrays."""

    def __init__(self, dataset: IterableDataset[T]) -> None:
        self.dataset = dataset
        self.arrays: torch.Tensor | None = None  # bytes of all arrays

    def __iter__(self) -> Iterator[T]:
        return iter(self.dataset)

    def __reduce__(self) -> Any:
        file, arrays = io.BytesIO(), list[pickle.PickleBuffer]()
        ForkingPickler(file, 5, True, arrays.append).dump(self.dataset)
        parts = [array.raw() for array in arrays]
        begins = [0, *itertools.accumulate(-(-len(part) // ALIGNED) * ALIGNED for part in parts)]
        spans = [slice(begin, begin + len(part)) for begin, part in zip(begins, parts, strict=False)]
        if self.arrays is None:
            self.arrays = shared_memory(begins[-1])
            for span, part in zip(spans, parts, strict=True):
                self.arrays.numpy()[span] = part
        return _received, (dict(os.environ), plugins.pack(), file.getvalue(), self.arrays, spans)


def _received(
    environment: Mapping[str, str], packed: Mapping[str, Sources], data: bytes, arrays: torch.Tensor, spans: list[slice]
) -> IterableDataset[Any]:
    """Return the data set in a loader process, after installing the plug-ins whose classes its objects may have."""
    os.environ.clear()
    os.environ.update(environment)
    plugins.install(packed)
    memory = arrays.numpy().data.toreadonly()
    return pickle.loads(data, buffers=[memory[span] for span in spans])  # type: ignore[no-any-return]


def _begin(records: Any, worker: int) -> None:
    """Make a loader process end when its parent ends, and send its log records to the parent."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    logging.getLogger().handlers = [logging.handlers.QueueHandler(records)]


def _end_with_parent() -> None:
    """End this process once its parent has died. PyTorch's own check comes only between reads, and after seconds."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


class _Relay(logging.Handler):
    """Handles log records of loader processes as if this process had logged them."""

    def emit(self, record: logging.LogRecord) -> None:
        if (logger := logging.getLogger(record.name)).isEnabledFor(record.levelno):
            logger.handle(record)


def _explained(items: Iterable[T]) -> Iterator[T]:
    """Yield the items, and raise errors as `of_process` returns them."""
    with in_one_line():
        yield from items


@contextmanager
def in_one_line() -> Iterator[None]:
    """A context in which an error of a loader process is raised as `of_process` returns it."""
    try:
        yield
    except Exception as e:
        said = of_process(e)
        raise said from (None if said is e else e)


def of_process(error: Exception) -> Exception:
    """Return an error of a loader process as one line. PyTorch puts the traceback of the process into its message."""
    text = str(error).strip()
    full = "shared memory" in text or SHARED in text or (isinstance(error, OSError) and error.errno == errno.ENOSPC)
    if full and os.path.isdir(SHARED):
        there, free = (f"{round(n / 2**20, 2):g} MiB" for n in shutil.disk_usage(SHARED)[::2])
        return UserError(
            f"a loader process found no room for its views: {SHARED} has {there}, {free} free; a larger one helps, in "
            "containers docker's --shm-size=8g or a volume of medium Memory, and so does data.workers=0"
        )
    said = (text.splitlines() or [type(error).__name__])[-1].strip()[:SAID]
    if OF_PROCESS in text and isinstance(error, UserError | Outage):
        return type(error)(said.partition(": ")[2])
    if OF_PROCESS in text or isinstance(error, OSError | EOFError | RuntimeError):  # PyTorch may leave OF_PROCESS out
        return error if isinstance(error, Outage) else RuntimeError(f"a loader process died: {said}")
    return error


class LoaderWatch:
    """Watches the processes of one loader inside a `with`. Processes that are suspended (SIGSTOP) at its end are
    killed: they receive no other signal, and Python would wait for them when this process ends."""

    def __init__(self, processes: Collection[BaseProcess], patience: float) -> None:
        """`patience` is the number of seconds for which a store may be unavailable."""
        self.processes, self.patience, self.named = processes, patience, False

    def __enter__(self) -> "LoaderWatch":
        return self

    def __exit__(self, *_: object) -> None:
        # When the interpreter is ending, multiprocessing has already ended the processes.
        for process in () if sys.is_finalizing() else self.processes:
            if _state(process) == psutil.STATUS_STOPPED:
                process.kill()

    def look(self, waited: float) -> None:
        """Log a warning when no batch has come for NAMED seconds. Raises RuntimeError after `patience` + SLACK seconds
        or, if a process is suspended, after STOPPED seconds. `waited` are the seconds without a batch so far."""
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
