"""Pretrain a recipe on one rank: join data, method, optimiser, checkpoints, tracking and evaluation."""

import contextlib
import logging
import threading
from typing import Any

import torch

from eagleray.base import dist
from eagleray.base.allocator import keep_freed_memory
from eagleray.base.devices import is_accelerator
from eagleray.engine import sharded
from eagleray.engine.compiling import compile_backbones, compiles
from eagleray.engine.export import to_timm
from eagleray.engine.numerics import exact_products, numerics
from eagleray.engine.precision import Precision
from eagleray.engine.world import World
from eagleray.methods.method import Method
from eagleray.models.token_linear import on_device
from eagleray.runs import evaluations, layout
from eagleray.runs.anchor import Anchor
from eagleray.runs.build import build_method, build_optimizer
from eagleray.runs.callbacks import Callbacks, RunView
from eagleray.runs.checked import Checked, checked
from eagleray.runs.data_inputs import data_inputs
from eagleray.runs.memory import explain_exhaustion
from eagleray.runs.monitor import Monitor
from eagleray.runs.origin import check_same_order
from eagleray.runs.plan import Plan, open_plan
from eagleray.runs.rank_run import RankRun, Stateful, clock_of
from eagleray.runs.recipe import Recipe
from eagleray.runs.restore import pretrained
from eagleray.runs.run_checkpoint import load_checkpoint, newest_checkpoint, save_checkpoint
from eagleray.runs.run_dir import RunDir
from eagleray.runs.start import build_started, take_progress
from eagleray.runs.start_guard import StartGuard
from eagleray.runs.step_log import OpenLine
from eagleray.runs.summary import CHECKED, UNCHECKED, VERDICT
from eagleray.runs.teacher import teach
from eagleray.runs.tracking import Tracking
from eagleray.runs.train import train
from eagleray.storage import store
from eagleray.storage.retry import at_least
from eagleray.views.preprocessing import Preprocessing

log = logging.getLogger(__name__)


def pretrain(
    recipe: Recipe, world: World, *, tracking: Tracking, command: str = "", stop: threading.Event | None = None
) -> dict[str, Any] | None:
    """Train a run, or continue it, until the planned steps are taken, then evaluate and export.

    Returns the summary, or None when the run was asked to stop before its end. `command` is the id of the user's
    command, and `stop` the event by which that asks a run in its own process to stop. Raises UserError, Outage and
    Preempted.
    """
    precision = Precision.of(recipe.precision, world.device)
    compiles(recipe.compile, world.device)  # a compiler that is missing is found before anything starts
    if world.why:  # an attempt before this one read the data and wrote the run, whose rights may just be renewed
        store.expect_access(recipe.out)
        for url in (place for source in recipe.data.sources() for place in (source.url, store.parent(source.url))):
            store.expect_access(url, ("list", "read"))  # an index may have its place elsewhere
    if not is_accelerator(world.device):
        keep_freed_memory()
    starting = contextlib.ExitStack()
    if world.spot:  # what is wrong with the recipe or the data, the command has said before there were ranks
        starting.enter_context(at_least(60 * recipe.data.patience))
    with (
        starting,
        numerics(precision, deterministic=recipe.deterministic),
        RunDir(recipe, world.rank, tracking, command=command, stop=stop) as folder,
    ):
        # Nobody reads checkpoints before rank 0 has the folder for itself.
        folder.epoch = dist.gather_objects(folder.epoch)[0]
        plan = open_plan(recipe, patience=60 * recipe.data.patience)
        state = newest_checkpoint(folder)
        resumes = state is not None
        check_same_order(plan.origin, state, folder.out, plan.shards_text)
        stateful, first = build_stateful(plan, world, precision, fresh=not resumes)
        state = load_checkpoint(state, stateful, first)
        step = folder.begin(state["step"], world.size, data_inputs(plan), lengths=state.get("lengths"), **plan.origin)
        starting.close()
        view = RunView(recipe, stateful.method, recipe.out, world.rank, world.size, world.device, plan.steps)
        folder.callbacks = Callbacks(view)
        folder.callbacks("start", step)
        run = RankRun(plan, world, folder, stateful, clock_of(state))
        log.info("%s", describe(run))
        for phase in recipe.phases[:-1]:
            log.info("curriculum: before epoch %d, %s", phase.until, phase)
        if plan.stream.selection:
            log.info("data.train: %s", plan.stream.selection)
        if world.why:
            log.warning("started again: %s", world.why)
        if recipe.start and not resumes:
            evaluations.at_start(run, step)
            save_checkpoint(run, step)
        if step < plan.steps:
            with explain_exhaustion(recipe, run.method, world.size):
                step = train(run, step)
        if step < plan.steps:
            log.info("stopped at step %d of %d; the same command continues", step, plan.steps)
            return None
        return finish(run, step)


def build_stateful(plan: Plan, world: World, precision: Precision, *, fresh: bool) -> tuple[Stateful, int]:
    """Build method, optimiser and monitor on the rank's device, and return them with the first step. A `fresh` run
    takes over what `start`, `backbone.weights` or `method.teacher.weights` name."""
    recipe, started = plan.recipe, None
    if fresh and recipe.start:
        started = build_started(recipe, len(plan.index))
        method = started.method
        log.info("%s", next(started.table()))
    else:
        weights = recipe.backbone.weights if fresh else None
        method = build_method(recipe, pretrained(weights) if weights else None)
        method.allocate(len(plan.index))
    if fresh:
        teach(recipe, method)
    place(method, recipe, world)
    optimizer = build_optimizer(recipe, method)
    labelled = plan.index.labelled and not method.supervised  # its images are mixed, and so are their labels
    monitor = Monitor(method, optimizer, recipe.monitor, images=len(plan.index), labelled=labelled)
    first = take_progress(plan, method, optimizer, started.source) if started else 0
    guard, anchor, line = StartGuard(plan), Anchor(recipe, method), OpenLine(monitor.layers)
    return Stateful(method, optimizer, monitor, precision, guard, anchor, line), first


def place(method: Method, recipe: Recipe, world: World) -> None:
    """Move a method to the rank's device, and synchronise, shard or compile it as the recipe says."""
    on_device(method, world.device)
    if method.export().batch_norm and recipe.parallel != "fsdp":  # FSDP divides contiguous weights alone
        method.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # what their convolutions are fast in
    world.synchronise(method)
    if recipe.parallel == "fsdp":
        sharded.shard(method)
    elif compiles(recipe.compile, world.device):
        compile_backbones(method)


def finish(run: RankRun, step: int) -> dict[str, Any]:
    """Export the backbone and evaluate it, then write and return the run's summary."""
    plan, folder = run.plan, run.folder
    folder.trained(step)
    backbone = run.export()
    if run.world.rank == 0:
        recipe = plan.recipe
        images = Preprocessing.of(recipe.evaluate.size, recipe.evaluate.resize, recipe.data.channels)
        with exact_products():
            to_timm(backbone, recipe.backbone, folder.path / layout.EXPORT, images, plan.origin)
    summary: dict[str, Any] = {"steps": step, "epochs": round(plan.at(step).epoch, 3)}
    summary["images"] = step * plan.stream.batch
    starts = dist.gather_objects(folder.begin_evaluation(summary))[0]
    scores = evaluations.final(run, backbone, step, starts)
    summary = scores | summary | {"wall_seconds": round(run.clock.seconds, 1)}
    summary[VERDICT] = evaluations.verdict(run, scores)
    summary |= dict(zip((CHECKED, UNCHECKED), what_was_checked(run), strict=True))
    folder.end(summary, run.clock.useful)
    folder.callbacks("end", summary)
    return summary


def what_was_checked(run: RankRun) -> Checked:
    """Return what the health of the run was checked for, as rank 0 has logged it."""
    plan, starts = run.plan, run.folder.starts
    return checked(
        run.folder.records(),
        lr=plan.lr.value,
        frozen=plan.frozen_steps,
        first=starts.starts[0]["step"] if starts and starts.starts else 0,
        labelled=plan.index.labelled and not run.method.supervised,
        started=run.stateful.guard.watches,
    )


def describe(run: RankRun) -> str:
    """Return the first line of a run's log: method, backbone, ranks, data and steps."""
    plan, world = run.plan, run.world
    millions = sum(x.numel() for x in run.method.export().parameters()) / 1e6
    return (
        f"{plan.recipe.method.name} on {plan.recipe.backbone.name} ({millions:.2f} M parameters), {world.size} rank"
        f"{'s' * (world.size > 1)} on {world.device.type}; "
        f"{len(plan.index)} images in {len(plan.index.shards)} shards, "
        f"{plan.steps} steps of {plan.stream.batch} ({plan.stream.steps_per_epoch} an epoch)"
    )
