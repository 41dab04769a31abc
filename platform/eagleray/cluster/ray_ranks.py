"""Run a function on several Ray processes that form a process group, such as a fine-tuning on several GPUs."""

import contextlib
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as td

from eagleray.base.cpu_share import cpus, give_cpus
from eagleray.base.errors import Outage, UserError, one_line
from eagleray.cluster.ray_map import amounts_of, gpu_share
from eagleray.cluster.session import machines, session
from eagleray.cluster.waiting import reserve_workers
from eagleray.config import plugins
from eagleray.engine import world

T = TypeVar("T")
R = TypeVar("R")
Note = Callable[[str], None]
ATTEMPTS = 3  # largest number of attempts; all processes start again when one has died
TOGETHER = 3.0  # seconds to wait after a rank's failure for the errors of other ranks


class Died(RuntimeError):
    """The process of a rank has died."""


def ray_ranks(function: Callable[[T, Note], R], task: T, *, workers: int, gpus: bool, note: Note) -> R:
    """Return what `function(task, note)` returns on rank 0 of `workers` processes. They run on the cluster at
    RAY_ADDRESS or, without it, on a local Ray. Each process has CPUs of its own and, with `gpus`, a GPU.

    Lines that the function passes to its `note` on rank 0 are passed to `note` here. If a process dies, all are started
    again: the function has to continue from what it has saved. If the function fails on one rank, all others are ended.

    Raises the UserError or Outage that the function raises, UserError when `gpus` is true and this machine has none,
    and RuntimeError for any other failure."""
    with session(cpus=None if gpus else max(workers, int(cpus()))) as ray:
        each = gpu_share(ray, workers, note) if gpus else {"num_cpus": cpu_share(machines(ray), workers)}
        for left in reversed(range(ATTEMPTS)):
            try:
                return _attempt(ray, (function, task), workers, each, note)
            except Died as e:
                if not left:
                    raise RuntimeError(f"{e}, {ATTEMPTS} times; the same command continues") from None
                note(f"{e}; all start again")
    raise AssertionError("unreachable")


def cpu_share(nodes: Sequence[Mapping[str, float]], workers: int) -> int:
    """Return the most CPUs per worker with which `workers` workers fit on the machines `nodes`; 1 if they never fit."""
    cpus = [int(node.get("CPU", 0)) for node in nodes]
    return max((n for n in range(1, max(cpus, default=0) + 1) if sum(c // n for c in cpus) >= workers), default=1)


def _attempt(ray: Any, work: tuple[Any, Any], workers: int, each: Mapping[str, float], note: Note) -> Any:
    """Start all ranks, wait for the result of rank 0 and return it. The ranks are always ended."""
    from ray import cloudpickle
    from ray.util.placement_group import placement_group_table
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    actors: list[Any] = []
    with reserve_workers(ray, workers, amounts_of(each), note) as group, contextlib.ExitStack() as ends:
        lines = _queue(ray)
        ends.callback(lines.shutdown, force=True)
        nodes = placement_group_table(group)["bundles_to_node_id"]
        # Sorted by machine, so that rank i of a later call is on the same machine and finds what it cached there.
        bundles = sorted(range(workers), key=lambda bundle: nodes[bundle])
        for rank, bundle in enumerate(bundles):
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
            kind = ray.remote(**each, scheduling_strategy=strategy)(Rank)
            actors.append(kind.remote(rank, workers, dict(each), plugins.pack()))
            ends.callback(ray.kill, actors[-1])
        payload = ray.put(cloudpickle.dumps(work))
        address = actors[0].listen.remote()
        results = [actor.run.remote(address, payload, lines) for actor in actors]
        _wait(ray, results, lambda: _show(lines, note))
        return pickle.loads(ray.get(results[0]))


def _queue(ray: Any) -> Any:
    """Return a queue for rank 0's lines. It is on this machine, so that it survives the loss of other machines."""
    from ray.util.queue import Queue
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return Queue(actor_options={"num_cpus": 0, "scheduling_strategy": here})


def _show(lines: Any, note: Note) -> None:
    """Pass the lines of rank 0 to `note`. Raises Died when their queue is lost."""
    from ray.exceptions import RayActorError

    try:
        new = lines.get_nowait_batch(lines.qsize())
    except RayActorError as e:
        raise Died(f"the process with the lines of rank 0 died: {one_line(e)}") from None
    for line in new:
        note(line)


def _wait(ray: Any, results: Sequence[Any], look: Callable[[], None]) -> None:
    """Wait until all ranks are done, and call `look` meanwhile.

    If ranks fail, raises the error that is the cause: when one rank fails, others lose their connection to it."""
    pending, errors, end = list(results), dict[int, Exception](), float("inf")
    while pending and time.monotonic() < end:
        ready, pending = ray.wait(pending, num_returns=1, timeout=0.5)
        look()
        for result in ready:
            try:
                ray.get(result)
            except Exception as e:
                errors[results.index(result)] = e
                end = min(end, time.monotonic() + TOGETHER)
    if errors:
        raise _explain(errors)


def _explain(errors: Mapping[int, Exception]) -> Exception:
    """Return the cause among the `errors` of ranks: a UserError or Outage, else a Died, else any other error."""
    from ray.exceptions import RayTaskError

    causes = {rank: getattr(e, "cause", e) if isinstance(e, RayTaskError) else e for rank, e in errors.items()}
    for cause in causes.values():
        if isinstance(cause, UserError | Outage):
            return cause
    for rank, e in errors.items():
        if not isinstance(e, RayTaskError):
            return Died(f"the process of rank {rank} died: {one_line(e)}")
    rank, cause = min(causes.items(), key=lambda item: isinstance(item[1], td.DistError | RuntimeError))
    return RuntimeError(f"rank {rank}: {type(cause).__name__}: {one_line(cause)}")


class Rank:
    """One rank, as a Ray actor."""

    def __init__(self, rank: int, size: int, each: Mapping[str, float], packed: Any) -> None:
        plugins.install(packed)
        self.rank, self.size, self.gpus = rank, size, "num_gpus" in each
        torch.set_num_threads(int(each["num_cpus"]))
        give_cpus(each["num_cpus"])

    def listen(self) -> tuple[str, int]:
        """Open the key-value store through which the ranks meet, and return its host and port."""
        from eagleray.cluster import process_group

        return process_group.listen()

    def run(self, address: tuple[str, int], payload: bytes, lines: Any) -> bytes:
        """Join the process group and call the function. Returns the pickled result on rank 0, b"" on other ranks."""
        from ray import cloudpickle

        from eagleray.cluster.process_group import bind

        function, task = pickle.loads(payload)
        device = world.device_of(self.gpus)
        bind()
        backend = f"cpu:gloo,{device.type}:{td.get_default_backend_for_device(device)}" if self.gpus else "gloo"
        store = td.TCPStore(*address, is_master=False)
        td.init_process_group(backend, store=store, rank=self.rank, world_size=self.size)
        result = function(task, lines.put if self.rank == 0 else lambda _: None)  # the lines of all ranks are the same
        td.barrier()  # if this rank ended first, a collective operation of the other ranks would fail
        return bytes(cloudpickle.dumps(result)) if self.rank == 0 else b""
