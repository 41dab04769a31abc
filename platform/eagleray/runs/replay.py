"""Take a step of a run again, from an earlier checkpoint and in a folder of its own.

Samples, crops and random numbers are functions of the recipe, the data and the step. So the state of a checkpoint, the
data and the same arithmetic give the same bits.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from eagleray import config
from eagleray.base import dist
from eagleray.base.errors import UserError
from eagleray.base.progress import progress_over
from eagleray.config.schedule import Progress
from eagleray.data.batch import Batch
from eagleray.data.index_file import aside_in
from eagleray.data.loader import Loader
from eagleray.data.quarantine import BadSample
from eagleray.engine import world as worlds
from eagleray.engine.numerics import numerics
from eagleray.engine.precision import Precision
from eagleray.engine.world import World
from eagleray.runs import layout
from eagleray.runs.build import make_trainer
from eagleray.runs.memory import explain_exhaustion
from eagleray.runs.origin import arithmetic
from eagleray.runs.plan import Plan, open_plan
from eagleray.runs.pretrain import build_stateful
from eagleray.runs.rank_run import Stateful
from eagleray.runs.recipe import Recipe
from eagleray.runs.run_checkpoint import checkpoint_below, load_checkpoint
from eagleray.runs.step_log import REPEATED, StepTable
from eagleray.runs.train import fit_micro_batch, loader_of, wrapper
from eagleray.storage import store

Note = Callable[[str], None]


@dataclass(frozen=True)
class Task:
    """The step of a run that every rank takes again, after those since the last checkpoint below it."""

    recipe: dict[str, Any]  # as plain values
    out: str  # of the run
    step: int  # whose batch is asked for
    gpus: bool  # each rank has an accelerator
    threads: int | None  # of a CPU; None: PyTorch's choice
    from_start: bool  # with fresh weights where no checkpoint is early enough


@dataclass(frozen=True)
class Taken:
    """The outcome of a step that was taken again, on all ranks together."""

    begin: int  # the step of the checkpoint
    values: dict[str, float]  # of the step, by the names in REPEATED
    keys: list[str]  # of the images of the batch
    bad: list[BadSample]  # that were met on the way
    about: dict[str, Any]  # the digests and the arithmetic, as a start records them


def take(task: Task, note: Note) -> Taken:
    """Take the steps of a task again as one rank. Called by all ranks together. Raises UserError and Outage."""
    recipe = config.check(Recipe, task.recipe, f"{task.out}/{layout.RECIPE}")
    world = worlds.local(task.gpus)
    precision = Precision.of(recipe.precision, world.device)
    with (
        tempfile.TemporaryDirectory(prefix="eagleray-replay-") as scratch,
        cpu_threads(task.threads),
        numerics(precision, deterministic=recipe.deterministic),
    ):
        plan = open_data(recipe, task.out, Path(scratch), note)
        try:
            state = checkpoint_below(recipe, task.out, Path(scratch), task.step)
        except FileNotFoundError as e:  # the run goes on, and keeps newer ones
            raise UserError(f"{e.filename}: was deleted meanwhile; the same command takes another checkpoint") from None
        check_state(task, state, len(plan.index))
        stateful, first = build_stateful(plan, world, precision, fresh=state is None)
        begin = load_checkpoint(state, stateful, first)["step"]
        note(f"taking step {begin + 1} to {task.step} again")
        with explain_exhaustion(recipe, stateful.method, world.size):
            return take_steps(task, plan, world, stateful, begin)


def open_data(recipe: Recipe, out: str, scratch: Path, note: Note) -> Plan:
    """Open the training data of a run in a folder of its own. Raises UserError and Outage."""
    for index in aside_in(out):
        (scratch / index.url.rpartition("/")[2]).write_bytes(store.store(out).get(index.url))
    return open_plan(replace(recipe, out=str(scratch), data=replace(recipe.data, test=None)), note=note)


def check_state(task: Task, state: dict[str, Any] | None, images: int) -> None:
    """Raises UserError when there is no checkpoint to begin with, or it was made with another number of images."""
    if state is None and not task.from_start:
        raise UserError(
            f"step {task.step}: {task.out}/{layout.CHECKPOINTS} keeps no intact checkpoint of an earlier step; "
            "--from-start takes all steps from the first one again"
        )
    if state and state["images"] != images:
        raise UserError(f"data.train: has {images} images, but the run was made with {state['images']}")


def take_steps(task: Task, plan: Plan, world: World, stateful: Stateful, begin: int) -> Taken:
    """Take the steps from `begin` to that of the task, and return what came out of it."""
    method, optimizer, monitor, precision = stateful[:4]
    loader = loader_of(plan, world)
    fit_micro_batch(plan, stateful, begin, loader.rows)
    bad: list[BadSample] = []
    wrap = wrapper(plan.recipe, world, stateful)
    of_steps = batches(plan, loader, begin, task.step, bad)
    steps = make_trainer(plan.recipe, method, optimizer, precision, wrap).steps(of_steps)
    for last in progress_over("steps", "replay", steps, task.step - begin):
        taken = last
        monitor.forget()
    keys = [plan.index.key(sample) for sample in taken.batch.index.tolist()]
    means = StepTable.of([taken.values], loader.rows).means()
    parts = dist.gather_objects((keys, bad))
    return Taken(
        begin=begin,
        values={name: means[name] for name in REPEATED},
        keys=[key for keys, _ in parts for key in keys],
        bad=[sample for _, met in parts for sample in met],
        about=plan.origin | arithmetic(plan.recipe, world.device),
    )


def batches(
    plan: Plan, loader: Loader, first: int, stop: int, bad: list[BadSample]
) -> Iterator[tuple[Progress, Batch]]:
    """Yield the batches from the step `first` on, before the step `stop`, and add the bad samples that are met."""
    for step, (batch, met) in enumerate(loader.batches(first, stop), first):
        bad += met
        yield plan.at(step), batch


@contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """A context in which PyTorch computes with so many threads on a CPU: the order of a sum depends on their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
