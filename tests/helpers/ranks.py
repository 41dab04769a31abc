"""Runs on several gloo ranks without Ray."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.multiprocessing as mp

from eagleray.engine.world import World
from eagleray.methods.method import Method
from eagleray.models.backbone import Backbone
from eagleray.runs import pretrain as training
from eagleray.runs import recipe as recipes
from eagleray.runs.build import build_method
from eagleray.runs.plan import make_plan, resolve_paths
from eagleray.runs.tracking import tracking_of


class Run(NamedTuple):
    """A run on so many ranks. With `after` it continues a copy of another run's folder from a step."""

    ranks: int
    out: Path
    overrides: Sequence[str]
    after: tuple[Path, int] | None = None


def train(recipe: Path, runs: Sequence[Run]) -> None:
    """Pretrain a recipe in float64 several times, in the same processes, which spares their start."""
    most = max(run.ranks for run in runs)
    barrier = mp.get_context("spawn").Barrier(most)
    mp.spawn(_process, (barrier, str(recipe), list(runs)), nprocs=most)


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
            training.build_method = in_float64  # type: ignore[assignment]
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
