"""Apply a function to tasks on Ray, with a limited number of them at once."""

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from eagleray.base.errors import Outage, UserError
from eagleray.cluster.session import session
from eagleray.config import plugins

T = TypeVar("T")
R = TypeVar("R")


def ray_map(function: Callable[[T], R], tasks: Iterable[T], *, workers: int | None = None) -> Iterator[R]:
    """Yield the results of a function for all tasks, in the order in which they finish. Runs on the cluster of
    RAY_ADDRESS if that is set, else in a Ray that is started on this machine. `workers` tasks run at once, by default
    as many as there are CPUs.

    A task whose process died is run once more. Raises the UserError or Outage that the function raises, and
    RuntimeError when a task's process dies twice.
    """
    with session(cpus=workers) as ray:
        from ray.exceptions import RayError, RayTaskError

        try:
            width = workers or max(int(ray.cluster_resources().get("CPU", 1)), 1)
            from ray import cloudpickle

            remote = ray.remote(num_cpus=1, max_retries=1)(_as_function(cloudpickle.dumps(function), plugins.pack()))
            yield from _results(ray, remote, map(cloudpickle.dumps, tasks), width)
        except RayTaskError as e:
            if isinstance(e.cause, UserError | Outage):
                raise e.cause from None
            raise
        except RayError as e:
            said = " ".join(str(e).split())[:300]
            raise RuntimeError(f"the process of a Ray task died twice: {said}; the same command continues") from None


def _as_function(function: bytes, packed: Mapping[str, plugins.Sources]) -> Callable[[bytes], Any]:
    """Return a function that calls the pickled `function` with a pickled task. It first loads the plug-ins, as the
    function or the task may come from one."""

    def call(task: bytes) -> Any:
        plugins.install(packed)
        return pickle.loads(function)(pickle.loads(task))

    return call


def _results(ray: Any, remote: Any, tasks: Iterator[bytes], width: int) -> Iterator[Any]:
    """Yield the results, with at most `width` tasks running."""
    running: set[Any] = set()
    more = True
    while more or running:
        while more and len(running) < width:
            try:
                running.add(remote.remote(next(tasks)))
            except StopIteration:
                more = False
        if running:
            [ready], _ = ray.wait(list(running), num_returns=1)
            running.remove(ready)
            yield ray.get(ready)
