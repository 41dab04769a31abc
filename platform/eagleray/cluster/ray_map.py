"""A map over tasks on Ray, a bounded number of them at once."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from eagleray.base.errors import Outage, UserError
from eagleray.cluster.session import session

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
            remote = ray.remote(num_cpus=1, max_retries=1)(_as_function(function))
            yield from _results(ray, remote, iter(tasks), width)
        except RayTaskError as e:
            if isinstance(e.cause, UserError | Outage):
                raise e.cause from None
            raise
        except RayError as e:
            said = " ".join(str(e).split())[:300]
            raise RuntimeError(f"a Ray worker was lost twice: {said}; the same command continues") from None


def _as_function(function: Callable[[T], R]) -> Callable[[T], R]:
    """Ray takes functions, not objects that can be called."""

    def call(task: T) -> R:
        return function(task)

    return call


def _results(ray: Any, remote: Any, tasks: Iterator[T], width: int) -> Iterator[Any]:
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
