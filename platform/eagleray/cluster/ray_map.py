"""A map over tasks on Ray, a bounded number of them at once."""

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from eagleray.base.errors import Outage, UserError
from eagleray.cluster.session import session
from eagleray.config import plugins

T = TypeVar("T")
R = TypeVar("R")


def ray_map(function: Callable[[T], R], tasks: Iterable[T], *, workers: int | None = None) -> Iterator[R]:
    """The function's results as they come, in no order; on the cluster of RAY_ADDRESS where that is set, else on one of
    our own. As many tasks at once as there are `workers`, or CPUs.

    A task whose process died is run once more. Raises UserError and Outage as the function does.
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
            raise RuntimeError(f"a Ray worker was lost twice: {said}; the same command continues") from None


def _as_function(function: bytes, packed: Mapping[str, plugins.Sources]) -> Callable[[bytes], Any]:
    """The function of pickled tasks that Ray runs. Function and task may be of a plug-in, which has to be imported
    before they are unpickled."""

    def call(task: bytes) -> Any:
        plugins.install(packed)
        return pickle.loads(function)(pickle.loads(task))

    return call


def _results(ray: Any, remote: Any, tasks: Iterator[bytes], width: int) -> Iterator[Any]:
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
