"""Apply a function to tasks on Ray, with a limited number of them at once."""

import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from eagleray.base.errors import Outage, UserError
from eagleray.cluster.session import machines, session
from eagleray.config import plugins

T = TypeVar("T")
R = TypeVar("R")
WAITING = 64  # tasks that wait for a CPU; an autoscaler starts nodes for them
SECONDS = 10.0  # between two looks how large the cluster is


def ray_map(
    function: Callable[[T], R], tasks: Iterable[T], *, workers: int | None = None, gpus: bool = False
) -> Iterator[R]:
    """Yield the results of a function for all tasks, in the order in which they finish. Runs on the cluster of
    RAY_ADDRESS if that is set, else in a Ray that is started on this machine. `workers` tasks run at once, by default
    as many as there are CPUs, also those of nodes that join later. With `gpus` each of them has a GPU, and its share of
    the machine's CPUs.

    A task whose process died is run once more. Raises the UserError or Outage that the function raises, UserError when
    `gpus` is true and there are none, and RuntimeError when a task's process dies twice.
    """
    with session(cpus=None if gpus else workers) as ray:
        from ray.exceptions import RayError, RayTaskError

        each = gpu_share(machines(ray)) if gpus else {"num_cpus": 1}

        def width() -> int:
            """Return how many tasks to hand to Ray: those that run now, on nodes that may have joined meanwhile, and
            some that wait, for which an autoscaler starts nodes."""
            return workers or int(ray.cluster_resources().get("CPU", 0)) + WAITING

        try:
            from ray import cloudpickle

            remote = ray.remote(**each, max_retries=1)(_as_function(cloudpickle.dumps(function), plugins.pack()))
            yield from _results(ray, remote, map(cloudpickle.dumps, tasks), width)
        except RayTaskError as e:
            if isinstance(e.cause, UserError | Outage):
                raise e.cause from None
            raise
        except RayError as e:
            said = " ".join(str(e).split())[:300]
            raise RuntimeError(f"the process of a Ray task died twice: {said}; the same command continues") from None


def gpu_share(nodes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the resources of a task with a GPU: as many CPUs as every machine with GPUs has for each of them.

    Raises UserError when no machine has a GPU."""
    shares = [node.get("CPU", 1) // node["GPU"] for node in nodes if node.get("GPU")]
    if not shares:
        raise UserError("gpus: none of the cluster's machines that are up has a GPU; without --gpus the tasks use CPUs")
    return {"num_gpus": 1, "num_cpus": max(min(shares), 1)}


def _as_function(function: bytes, packed: Mapping[str, plugins.Sources]) -> Callable[[bytes], Any]:
    """Return a function that calls the pickled `function` with a pickled task. It first loads the plug-ins, as the
    function or the task may come from one."""

    def call(task: bytes) -> Any:
        plugins.install(packed)
        return pickle.loads(function)(pickle.loads(task))

    return call


def _results(ray: Any, remote: Any, tasks: Iterator[bytes], width: Callable[[], int]) -> Iterator[Any]:
    """Yield the results, with at most `width()` tasks handed to Ray."""
    running: set[Any] = set()
    more, most, asked = True, width(), time.monotonic()
    while more or running:
        while more and len(running) < most:
            try:
                running.add(remote.remote(next(tasks)))
            except StopIteration:
                more = False
        if running:
            [ready], _ = ray.wait(list(running), num_returns=1)
            running.remove(ready)
            yield ray.get(ready)
            if time.monotonic() > asked + SECONDS:
                most, asked = width(), time.monotonic()
