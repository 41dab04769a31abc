"""Runs on several gloo ranks without Ray."""

import faulthandler
import multiprocessing
import os
import pickle
import shutil
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from helpers import forked

from eagleray.base.contexts import on_error
from eagleray.engine.world import World
from eagleray.methods.method import Method
from eagleray.models.backbone import Backbone
from eagleray.runs import evaluations, rank_run, start
from eagleray.runs import pretrain as training
from eagleray.runs import recipe as recipes
from eagleray.runs.build import build_method
from eagleray.runs.checks import make_plan
from eagleray.runs.sources import resolve_paths
from eagleray.runs.tracking import tracking_of

LIMIT = 240  # seconds that a rank may take


class Run(NamedTuple):
    """A run on so many ranks. With `after` it continues a copy of another run's folder from a step."""

    ranks: int
    out: Path
    overrides: Sequence[str]
    after: tuple[Path, int] | None = None


def train(recipe: Path, runs: Sequence[Run]) -> None:
    """Pretrain a recipe in float64 several times, in the same processes, which spares their start."""
    most = max(run.ranks for run in runs)
    barrier = forked.CONTEXT.Barrier(most)
    forked.start_ranks(_process, (barrier, str(recipe), list(runs)), most)


def in_float64(*args: Any, **kwargs: Any) -> Method:
    """Build a method of float64, in which orders of summation make no difference, for images of float32."""
    method = build_method(*args, **kwargs).double()
    for backbone in (m for m in method.modules() if isinstance(m, Backbone)):
        backbone.model.patch_embed.register_forward_pre_hook(lambda _, images: images[0].double())
    return method


def _process(rank: int, barrier: Any, name: str, runs: list[Run]) -> None:
    torch.set_num_threads(1)
    for run in runs:
        recipe = resolve_paths(recipes.load(name, [*run.overrides, f"out={run.out}"]))
        if rank == 0:
            if run.after:
                _rewind(*run.after, run.out)
            make_plan(recipe)  # as the command does first: it writes the index
        barrier.wait()
        if rank < run.ranks:
            torch.distributed.init_process_group("gloo", f"file://{run.out}.store", rank=rank, world_size=run.ranks)
            for module in (start, evaluations, rank_run):
                module.build_method = in_float64  # type: ignore[attr-defined]
            training.pretrain(recipe, World(torch.device("cpu")), tracking=tracking_of(run.out))
            torch.distributed.destroy_process_group()
        barrier.wait()


def _rewind(source: Path, step: int, out: Path) -> None:
    """Copy the folder of a run as it was at a step with a checkpoint."""
    shutil.copytree(source, out)
    for path in (out / "checkpoints").glob("step-*"):
        if int(path.name.partition(".")[0].partition("-")[2]) > step:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    (out / "summary.json").unlink()


def on_ranks(
    ranks: int, function: Callable[..., Any], folder: Path, *args: Any, start: str = "forkserver"
) -> list[Any]:
    """Return what a function returns on each rank of a process group. Raises the first error of a rank, and an
    AssertionError if a rank dies or has not ended after `LIMIT` seconds, with the stacks of its threads on stderr.

    A function that pickle cannot send, or whose module a test has patched, needs copies of this process,
    `start="fork"`. A copy has none of its other threads, so a lock that one of them held is never released there, and
    PyTorch refuses gradients in it if this process has computed some while an accelerator was there, such as the
    simulated one."""
    context: Any = multiprocessing.get_context(start)
    queue: Any = context.SimpleQueue()
    store = folder / f"store-{ranks}-{len(list(folder.glob('store-*')))}"
    given = (ranks, store, queue, function, args)
    one = partial(forked.in_environment, dict(os.environ), _one)
    processes = [context.Process(target=one, args=(rank, *given)) for rank in range(ranks)]
    for process in processes:
        process.start()
    out: dict[int, Any] = {}
    with on_error(lambda: [process.kill() for process in processes]):
        while len(out) < ranks:
            while queue.empty():
                assert not any(process.exitcode for process in processes), "a rank died"
                connection.wait([queue._reader, *(process.sentinel for process in processes if process.is_alive())], 1)
            rank, out[rank] = pickle.loads(queue.get())
    for process in processes:
        process.join()
    for result in out.values():
        if isinstance(result, Exception):
            raise result
    return [out[rank] for rank in range(ranks)]


def _one(rank: int, ranks: int, store: Path, queue: Any, function: Callable[..., Any], args: Sequence[Any]) -> None:
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=ranks)
    try:
        result = function(*args)
    except Exception as e:
        e.add_note(traceback.format_exc())
        result = e
    queue.put(pickle.dumps((rank, result)))
    torch.distributed.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()
