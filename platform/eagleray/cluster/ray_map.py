"""Apply a function to many tasks on Ray, such as reading shards to index them, with a limit on simultaneous tasks."""

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
WAITING = 64  # number of tasks that wait for a CPU in Ray, so that an autoscaler starts nodes for them
SECONDS = 10.0  # seconds between two look-ups of the number of CPUs of the cluster


def ray_map(
    function: Callable[[T], R], tasks: Iterable[T], *, workers: int | None = None, gpus: bool = False
) -> Iterator[R]:
    """Yield the results of a function for all tasks, in the order in which they finish. Runs on the cluster at
    RAY_ADDRESS or, without it, on a local Ray. `workers` tasks run at once, by default as many as there are CPUs,
    including those of nodes that join later. With `gpus` each task has a GPU and an equal share of the machine's CPUs.
    A line is printed while a cluster has no room for a task.

    A task whose process died is run once more. Raises the UserError or Outage that the function raises, UserError when
    `gpus` is true and this machine has none, and RuntimeError when a task's process dies twice."""
    with session(cpus=None if gpus else workers) as ray:
        from ray.exceptions import RayError, RayTaskError

        each = gpu_share(ray, 1, say) if gpus else {"num_cpus": 1.0}
        name = f"eagleray-map-{secrets.token_hex(8)}"
        waiting = TaskWaiting(ray, workers or 1, each, say, name)

        def width() -> int:
            """Return how many tasks to hand to Ray: one for each CPU of the nodes that are up now, and WAITING more."""
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
    """Wait until a cluster has room for one task, with a GPU if `gpus`, and print a line meanwhile. Commands call this
    before they import PyTorch, so that they take little of the head's memory while they wait."""
    if joining():
        with session() as ray, reserve_workers(ray, 1, {"CPU": 1.0} | ({"GPU": 1.0} if gpus else {}), say):
            pass


class TaskWaiting(Waiting):
    """Checks whether the cluster has room for a task, and prints a line while it has not."""

    def __init__(self, ray: Any, most: int, each: Mapping[str, float], say: Say, name: str) -> None:
        """`each` has a task's resources by argument of `ray.remote`; `name` is the name of the map, see `_begin`."""
        self.name = name
        super().__init__(ray, 1, most, amounts_of(each), say)

    def _groups(self) -> dict[str, Any]:
        return {}  # tasks have no placement groups

    def look(self) -> bool:
        """Do the same as `Waiting.look`. A local Ray never waits: nothing is printed, and the answer is False."""
        return joining() and super().look()

    def _placed(self) -> bool:
        """Return whether a machine is large enough and a task has begun. The other tasks then only await their turn."""
        return self._fits() and _begun(self.name)


def _begin(name: str) -> None:
    """Store in the cluster that a task of the map `name` has begun. Called in the task."""
    from ray.experimental.internal_kv import _internal_kv_put

    _internal_kv_put(name, b"1")


def _begun(name: str) -> bool:
    """Return whether a task of the map `name` has called `_begin`."""
    from ray.experimental.internal_kv import _internal_kv_exists

    return bool(_internal_kv_exists(name))


def _forget(name: str) -> None:
    """Delete the key that `_begin` has stored, as a cluster may outlive many maps."""
    from ray.experimental.internal_kv import _internal_kv_del

    with contextlib.suppress(Exception):  # the cluster may have ended
        _internal_kv_del(name)


def gpu_share(ray: Any, number: int, say: Say) -> dict[str, float]:
    """Return the resources of a task: a GPU, and as many CPUs as a GPU's share on the machine where that is lowest.

    A cluster that has no GPU yet is asked for `number` GPUs; a line is printed meanwhile. Raises UserError when Ray is
    local and this machine has no GPU."""
    if joining() and not any(node.get("GPU") for node in machines(ray)):
        with reserve_workers(ray, number, {"CPU": 1.0, "GPU": 1.0}, say):
            pass  # machines with GPUs are up now, so that their CPUs can be counted below
    shares = [node.get("CPU", 1) // node["GPU"] for node in machines(ray) if node.get("GPU")]
    if not shares:
        raise UserError("gpus: this machine has no GPU; without --gpus the tasks use CPUs, RAY_ADDRESS names a cluster")
    return {"num_gpus": 1, "num_cpus": max(min(shares), 1)}


def amounts_of(each: Mapping[str, float]) -> dict[str, float]:
    """Return resources by Ray's names, such as CPU, given resources by argument of `ray.remote`, such as num_cpus."""
    return {name: float(each[key]) for name, key in (("CPU", "num_cpus"), ("GPU", "num_gpus")) if key in each}


def _as_function(
    function: bytes, packed: Mapping[str, plugins.Sources], cpus: float, name: str
) -> Callable[[bytes], Any]:
    """Return a function that calls the pickled `function` with a pickled task. It first loads the plug-ins `packed`,
    which function and task may need, and limits the task to `cpus` CPUs. `name` is the map's name in `_begin`."""

    def call(task: bytes) -> Any:
        _begin(name)
        give_cpus(cpus)
        plugins.install(packed)
        return pickle.loads(function)(pickle.loads(task))

    return call


def _results(
    ray: Any, remote: Any, tasks: Iterator[bytes], width: Callable[[], int], look: Callable[[], object]
) -> Iterator[Any]:
    """Yield the results of the tasks. At most `width()` are handed to Ray at a time; `look` is called every second."""
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
    """Return the function that reads tars to index them: on the cluster at RAY_ADDRESS or, without it, in threads."""
    return scan_on_cluster if joining() else scan_here


def scan_on_cluster(things: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield a pair for each of `things`, in any order: a shard or an image of a folder, and what was read from it.

    Tasks on the cluster read remote URLs. This process reads local paths, as other machines may not have them."""
    for far, some in itertools.groupby(things, key=lambda thing: is_remote(thing.url)):
        scan = functools.partial(ray_map, scan_shard) if far else scan_here
        yield from scan(some)
