"""Apply a function to tasks on Ray, with a limited number of them at once, such as reading shards to index them."""

import contextlib
import functools
import itertools
import pickle
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, TypeVar

from eagleray.base.console import say
from eagleray.base.cpu_share import give_cpus
from eagleray.base.errors import Outage, UserError
from eagleray.cluster.session import joining, machines, session
from eagleray.cluster.waiting import Say, Waiting, reserve_workers
from eagleray.config import plugins
from eagleray.data.index import ScanAll, scan_here, scan_shard
from eagleray.storage.store import is_remote

T = TypeVar("T")
R = TypeVar("R")
WAITING = 64  # tasks that wait for a CPU; an autoscaler starts nodes for them
SECONDS = 10.0  # the size of the cluster is looked up this often


def ray_map(
    function: Callable[[T], R], tasks: Iterable[T], *, workers: int | None = None, gpus: bool = False
) -> Iterator[R]:
    """Yield the results of a function for all tasks, in the order in which they finish. Runs on the cluster of
    RAY_ADDRESS if that is set, else in a Ray that is started on this machine. `workers` tasks run at once, by default
    as many as there are CPUs, also those of nodes that join later. With `gpus` each of them has a GPU, and its share of
    the machine's CPUs. While a cluster has no room for a task, a line says so.

    A task whose process died is run once more. Raises the UserError or Outage that the function raises, UserError when
    `gpus` is true and this machine has none, and RuntimeError when a task's process dies twice.
    """
    with session(cpus=None if gpus else workers) as ray:
        from ray.exceptions import RayError, RayTaskError

        each = gpu_share(ray, 1, say) if gpus else {"num_cpus": 1.0}
        name = f"eagleray-map-{secrets.token_hex(8)}"
        waiting = TaskWaiting(ray, workers or 1, each, say, name)

        def width() -> int:
            """Return how many tasks to hand to Ray: those that run now, on nodes that may have joined meanwhile, and
            some that wait, for which an autoscaler starts nodes."""
            return workers or int(ray.cluster_resources().get("CPU", 0)) + WAITING

        try:
            from ray import cloudpickle

            call = _as_function(cloudpickle.dumps(function), plugins.pack(), each["num_cpus"], name)
            remote = ray.remote(**each, max_retries=1)(call)
            yield from _results(ray, remote, map(cloudpickle.dumps, tasks), width, waiting.look)
        except RayTaskError as e:
            if isinstance(e.cause, UserError | Outage):
                raise e.cause from None
            raise
        except RayError as e:
            said = " ".join(str(e).split())[:300]
            raise RuntimeError(f"the process of a Ray task died twice: {said}; the same command continues") from None
        finally:
            _forget(name)


def await_room(gpus: bool) -> None:
    """Wait until a cluster has room for a task, with a GPU if asked, and say so meanwhile. The driver of a command that
    computes with what tasks return imports PyTorch afterwards, so that it takes little of the head while it waits."""
    if joining():
        with session() as ray, reserve_workers(ray, 1, {"CPU": 1.0} | ({"GPU": 1.0} if gpus else {}), say):
            pass


class TaskWaiting(Waiting):
    """Looks whether the cluster has room for a task, and prints a line while it has not."""

    def __init__(self, ray: Any, most: int, each: Mapping[str, float], say: Say, name: str) -> None:
        """`each` is what a task asks for, by the names of Ray's arguments; `name` is that of `_begin`."""
        self.name = name
        super().__init__(ray, 1, most, amounts_of(each), say)

    def _groups(self) -> dict[str, Any]:
        return {}  # tasks are in none

    def look(self) -> bool:
        """Do as every Waiting, but nothing in a Ray of this machine alone, which has room."""
        return joining() and super().look()

    def _placed(self) -> bool:
        """Return whether a machine is large enough for a task, and a task has begun, so that the others take turns."""
        return self._fits() and _begun(self.name)


def _begin(name: str) -> None:
    """Tell the cluster, in a task, that a task of the map with this name has begun."""
    from ray.experimental.internal_kv import _internal_kv_put

    _internal_kv_put(name, b"1")


def _begun(name: str) -> bool:
    """Return whether a task has called `_begin`."""
    from ray.experimental.internal_kv import _internal_kv_exists

    return bool(_internal_kv_exists(name))


def _forget(name: str) -> None:
    """Take back what `_begin` told the cluster, which may outlive many maps."""
    from ray.experimental.internal_kv import _internal_kv_del

    with contextlib.suppress(Exception):  # the cluster may have gone
        _internal_kv_del(name)


def gpu_share(ray: Any, number: int, say: Say) -> dict[str, float]:
    """Return the resources of a task with a GPU: as many CPUs as every machine with GPUs has for each of them.

    A cluster that may grow is asked for `number` GPUs while it has none, and a line says so. Raises UserError when Ray
    is this machine alone, and it has no GPU."""
    if joining() and not any(node.get("GPU") for node in machines(ray)):
        with reserve_workers(ray, number, {"CPU": 1.0, "GPU": 1.0}, say):
            pass  # an autoscaler has started machines, whose shares are known now
    shares = [node.get("CPU", 1) // node["GPU"] for node in machines(ray) if node.get("GPU")]
    if not shares:
        raise UserError("gpus: this machine has no GPU; without --gpus the tasks use CPUs, RAY_ADDRESS names a cluster")
    return {"num_gpus": 1, "num_cpus": max(min(shares), 1)}


def amounts_of(each: Mapping[str, float]) -> dict[str, float]:
    """Return amounts of resources by Ray's names of them instead of its arguments'."""
    return {name: float(each[key]) for name, key in (("CPU", "num_cpus"), ("GPU", "num_gpus")) if key in each}


def _as_function(
    function: bytes, packed: Mapping[str, plugins.Sources], cpus: float, name: str
) -> Callable[[bytes], Any]:
    """Return a function that calls the pickled `function` with a pickled task. It first loads the plug-ins, as the
    function or the task may come from one. The task has so many `cpus`; `name` is that of `_begin`."""

    def call(task: bytes) -> Any:
        _begin(name)
        give_cpus(cpus)
        plugins.install(packed)
        return pickle.loads(function)(pickle.loads(task))

    return call


def _results(
    ray: Any, remote: Any, tasks: Iterator[bytes], width: Callable[[], int], look: Callable[[], object]
) -> Iterator[Any]:
    """Yield the results, with at most `width()` tasks handed to Ray. `look` is called every second."""
    running: set[Any] = set()
    most, asked = width(), time.monotonic()
    while True:
        running.update(remote.remote(task) for task in islice(tasks, max(most - len(running), 0)))
        if not running:
            return
        ready, _ = ray.wait(list(running), num_returns=1, timeout=1)
        look()
        for result in ready:
            running.remove(result)
            yield ray.get(result)
        if time.monotonic() > asked + SECONDS:
            most, asked = width(), time.monotonic()


def scanner() -> ScanAll:
    """Return what reads tars to index them: the cluster of RAY_ADDRESS if that is set, else threads of this process."""
    return scan_on_cluster if joining() else scan_here


def scan_on_cluster(things: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield shards with the rows of their samples, or images with what was read of them, in any order, each read by a
    task on the cluster.

    What is at a local path is read here, as other machines may not have it.
    """
    for far, some in itertools.groupby(things, key=lambda thing: is_remote(thing.url)):
        scan = functools.partial(ray_map, scan_shard) if far else scan_here
        yield from scan(some)
