"""Pretrain a recipe on one rank: join data, method, optimiser, checkpoints, tracking and evaluation."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from eagleray import config
from eagleray.base import dist, shards
from eagleray.base.allocator import keep_freed_memory
from eagleray.base.devices import is_accelerator
from eagleray.base.errors import Outage, Preempted, UserError
from eagleray.config.schedule import Progress
from eagleray.data.loader import Loader, processes
from eagleray.data.quarantine import Quarantine
from eagleray.engine import checkpoint, sharded, sharded_checkpoint
from eagleray.engine.checkpoint_names import stem, step_of
from eagleray.engine.compiling import compile_backbones, compiles
from eagleray.engine.export import to_timm
from eagleray.engine.numerics import exact_products, numerics
from eagleray.engine.optim import lay_out_moments
from eagleray.engine.precision import Precision
from eagleray.engine.world import World
from eagleray.methods.method import Method
from eagleray.models.token_linear import on_device
from eagleray.runs import evaluations, layout
from eagleray.runs import recipe as recipes
from eagleray.runs.anchor import Anchor
from eagleray.runs.auto_micro_batch import choose_micro_batch, set_micro_batch
from eagleray.runs.build import build_method, build_optimizer, optimizer_steps
from eagleray.runs.cadence import Cadence
from eagleray.runs.callbacks import Callbacks, RunView
from eagleray.runs.data_inputs import data_inputs
from eagleray.runs.memory import explain_exhaustion
from eagleray.runs.monitor import Monitor
from eagleray.runs.origin import arithmetic, check_same_order
from eagleray.runs.plan import Plan, open_plan
from eagleray.runs.profile import profiled
from eagleray.runs.rank_run import RankRun, Stateful, clock_of
from eagleray.runs.recipe import Recipe
from eagleray.runs.restore import pretrained
from eagleray.runs.run_dir import RunDir
from eagleray.runs.start import build_started, take_progress
from eagleray.runs.start_guard import StartGuard
from eagleray.runs.step_log import OpenLine, StepLog
from eagleray.runs.teacher import teach
from eagleray.runs.tracking import Tracking
from eagleray.storage import store
from eagleray.storage.retry import at_least
from eagleray.views.preprocessing import Preprocessing

log = logging.getLogger(__name__)
GROUPED = "a new run takes over its weights with start='{from: OUT, what: method}'"


def pretrain(
    recipe: Recipe, world: World, *, tracking: Tracking, command: str = "", stop: threading.Event | None = None
) -> dict[str, Any] | None:
    """Train a run, or continue it, until the planned steps are taken, then evaluate and export.

    Returns the summary, or None when the run was asked to stop before its end. `command` is the id of the user's
    command, and `stop` the event by which that asks a run in its own process to stop. Raises UserError, Outage and
    Preempted.
    """
    precision = Precision.of(recipe.precision, world.device)
    compiles(recipe.compile, world.device)  # before anything starts
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
        check_same_order(plan.origin, state, folder.out)
        stateful, first = build_stateful(plan, world, precision, fresh=not resumes)
        state = load_checkpoint(state, stateful, first)
        about = plan.origin | arithmetic(recipe, world.device)
        step = folder.begin(state["step"], world.size, data_inputs(plan), resumes=resumes, **about)
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
    return Stateful(method, optimizer, monitor, precision, StartGuard(plan), Anchor(recipe, method), OpenLine()), first


def place(method: Method, recipe: Recipe, world: World) -> None:
    """Move a method to the rank's device, and synchronise, shard or compile it as the recipe says."""
    on_device(method, world.device)
    if method.export().batch_norm and recipe.parallel != "fsdp":  # which divides contiguous weights alone
        method.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # what their convolutions are fast in
    world.synchronise(method)
    if recipe.parallel == "fsdp":
        sharded.shard(method)
    elif compiles(recipe.compile, world.device):
        compile_backbones(method)


def train(run: RankRun, start: int) -> int:
    """Take the steps from `start` on. Returns the number of steps of the run so far, which is less than planned when it
    was asked to stop.

    Raises UserError or Outage when the data cannot be read any more, and Preempted, each after saving a checkpoint.
    """
    plan, world, folder, stateful, clock = run
    loader = loader_of(plan, world)
    fit_micro_batch(plan, stateful, start, loader.rows)
    stateful.monitor.step = step = start
    cadence = Cadence(plan, start)
    step_log = StepLog(
        plan, world, folder, open_quarantine(run), stateful.monitor, clock, line=stateful.line, cadence=cadence
    )
    batches = step_log.feed(loader, start)
    if plan.recipe.profile and world.rank == 0:
        batches = profiled(batches, plan.recipe.profile, folder.path, world.device)
    method, optimizer, precision, guard = stateful.method, stateful.optimizer, stateful.precision, stateful.guard
    lost = ""
    wrap = wrapper(plan.recipe, world, stateful)
    for taken in optimizer_steps(plan.recipe, method, optimizer, batches, precision, wrap):
        step = taken.at.step + 1
        step_log.add(taken)
        folder.callbacks("step", taken)
        if guard.due(step) and (lost := look_at_start(run, step_log, step)):
            break
        if cadence.records(step):
            write_record(run, step_log, taken.at, evaluation=cadence.evaluates(step))
        if cadence.evaluates(step):
            cadence.saved(step)
        if step_log.saves and cadence.saved_step < step:
            step_log.settle(step)
            save_checkpoint(run, step)
            cadence.saved(step)
        step_log.mark = time.perf_counter()
    if step_log.taken:  # the steps ended early
        write_record(run, step_log, plan.at(step - 1), evaluation=False)
    if cadence.saved_step < step and not lost:
        save_checkpoint(run, step)
    if problem := first_problem(dist.gather_objects(folder.settle()), step_log.problem):
        raise problem
    if lost:
        raise UserError(lost)
    return step


def first_problem(saving: Sequence[Exception | None], own: Exception | None) -> Exception | None:
    """Return why the run ends, from the ranks' errors of `saving` and from what has ended the steps: a rank that ends
    takes the others with it. On a machine that is about to be taken away a store that does not answer costs the steps
    since the last checkpoint, and not the run."""
    for problem in saving:
        if isinstance(own, Preempted) and isinstance(problem, Outage):
            log.warning("the last steps are not saved: %s", problem)
        elif problem:
            return problem
    return own


def look_at_start(run: RankRun, step_log: StepLog, step: int) -> str:
    """Compare the features with those at the start, note what is found, and return why the run ends if it does."""
    began, guard = time.perf_counter(), run.stateful.guard
    evaluations.compare_with_start(run, step)
    run.folder.note_findings(guard.findings())
    step_log.since += time.perf_counter() - began  # the time of an evaluation is not that of steps
    return guard.lost()


def wrapper(recipe: Recipe, world: World, stateful: Stateful) -> Callable[[Method], nn.Module]:
    """Return a function that wraps a method into the module that the loop calls: with the anchor's loss, if there is
    one, and with gradients that are averaged over ranks."""
    return lambda method: world.wrap(stateful.anchor.joined(method), reduce=recipe.optim.reduce)


def loader_of(plan: Plan, world: World) -> Loader:
    """Return what reads this rank's share of the run's batches."""
    workers = processes(plan.recipe.data.workers, world.cpus)
    compiled = compiles(plan.recipe.compile, world.device)
    return Loader(
        plan.stream, rank=world.rank, ranks=world.size, workers=workers, device=world.device, compiled=compiled
    )


def fit_micro_batch(plan: Plan, stateful: Stateful, start: int, rows: tuple[int, ...]) -> None:
    """Let the backbones take as many images at once as fit into memory, where the recipe leaves that to the run."""
    if plan.recipe.optim.micro_batch == "auto":
        model = stateful.anchor.joined(stateful.method)
        moments = sum(v.nbytes for s in stateful.optimizer.state.values() for v in s.values() if torch.is_tensor(v))
        at, precision = plan.at(start), stateful.precision
        size = choose_micro_batch(plan.recipe, stateful.method, precision, at, rows, model, moments)
        set_micro_batch(stateful.method, size)
        stateful.monitor.forget()


def open_quarantine(run: RankRun) -> Quarantine:
    """Return the list of bad samples. It starts with those that were found when the data was indexed and, on all
    ranks, with those in the file of rank 0: only there is the file of a remote run fetched. Called by all ranks
    together."""
    index = run.plan.index
    quarantine = Quarantine(
        run.folder.path / layout.QUARANTINE,
        samples=len(index) + len(index.bad),
        limit=run.plan.recipe.data.bad_limit,
    )
    quarantine.bad = dist.from_rank_zero(lambda: quarantine.bad)
    quarantine.add(index.bad, write=run.world.rank == 0)
    return quarantine


def write_record(run: RankRun, step_log: StepLog, at: Progress, *, evaluation: bool) -> None:
    """Write a line of metrics.jsonl with the means since the last line. With `evaluation`, save a checkpoint and
    evaluate first, and add the scores.

    A process that dies in an evaluation, for want of memory, goes on behind it when it starts again."""
    record = step_log.flush(at, run.plan.lr(at)) | run.stateful.guard.flush()
    if evaluation:
        save_checkpoint(run, at.step + 1)
        run.folder.settle()  # a warning is in the log if the checkpoint could not be saved
        record |= evaluations.online(run, at.step + 1)
        step_log.since = time.perf_counter()  # the time of an evaluation is not that of steps
    run.folder.log(record)
    run.folder.callbacks("log", record)
    if run.world.rank == 0:
        run.world.show(record, run.plan.steps)


def newest_checkpoint(folder: RunDir) -> dict[str, Any] | None:
    """Return the newest checkpoint of the run, or None. Raises UserError when it was made with another recipe."""
    return checkpoint_below(folder.recipe, folder.out, folder.scratch)


def checkpoint_below(recipe: Recipe, out: str, scratch: Path, step: int | None = None) -> dict[str, Any] | None:
    """Return the newest checkpoint of the run in `out`, of those below a step if one is given, or None. Called by all
    ranks together. Raises UserError when it was made with another recipe than this one."""
    url, patience = f"{out}/checkpoints", 60 * recipe.data.patience
    listed = dist.from_rank_zero(partial(checkpoint.listing, url, patience))
    if step is not None:
        blobs = {file: blob for file, blob in listed.blobs.items() if step_of(stem(file)) < step}
        listed = listed._replace(blobs=blobs)
    whole = recipe.parallel == "ddp" or dist.size() == 1
    state = checkpoint.newest(url, scratch, patience=patience, whole=whole, listed=listed)
    if len(set(dist.gather_objects(state and state["step"]))) > 1:
        raise RuntimeError("ranks read different checkpoints")  # of a disk that fails; a restart may mend it
    if state and state["digest"] != recipes.digest(recipe):
        raise UserError(f"{out}: its checkpoints were made with another recipe")
    return state


def load_checkpoint(state: dict[str, Any] | None, stateful: Stateful, first: int = 0) -> dict[str, Any]:
    """Load a checkpoint into the objects and return it. Without a checkpoint return the `first` step and the seconds
    of a run that has not begun. Raises UserError when its optimiser has other groups of parameters."""
    if state is None:
        return {"step": first, "seconds": 0.0, "useful": 0.0}
    groups = state["optimizer"]["param_groups"], stateful.optimizer.param_groups
    saved, own = ([len(group["params"]) for group in side] for side in groups)
    if saved != own:
        found = f"the checkpoint of step {state['step']} groups the parameters otherwise ({saved}, not {own})"
        raise UserError(f"{found}; {GROUPED}")
    parts = stateful._asdict()
    if shards.sharded(next(stateful.method.parameters())):
        read = partial(sharded_checkpoint.read_rows, Path(state.get("shards", "")))
        sharded.load(parts.pop("method"), parts.pop("optimizer"), state, read)
    for name, part in parts.items():
        part.load_state_dict(state[name])
    if not shards.sharded(next(stateful.method.parameters())):
        lay_out_moments(stateful.optimizer)
    return state


def save_checkpoint(run: RankRun, step: int) -> None:
    """Save a checkpoint in the background. Only rank 0 saves, as every rank holds the same weights and moments, unless
    these are sharded."""
    guard = run.stateful.guard
    if guard.watches:
        evaluations.compare_with_start(run, step)
        run.folder.keep(guard.saved())
    if dist.rank() == 0 or run.sharded:
        state = {
            "step": step,
            "seconds": run.clock.seconds,
            "useful": run.clock.useful,
            "digest": recipes.digest(run.plan.recipe),
            "recipe": config.dump(run.plan.recipe),
            "images": len(run.plan.index),
            "origin": run.plan.origin,
        } | {name: part.state_dict() for name, part in run.stateful._asdict().items()}
        state["optimizer"] = sharded.optimizer_state(run.stateful.optimizer)
        run.folder.save(step, state)
        log.debug("saving step %d", step)
    run.folder.callbacks("checkpoint", step)


def finish(run: RankRun, step: int) -> dict[str, Any]:
    """Export the backbone and evaluate it, then write and return the run's summary."""
    plan, folder = run.plan, run.folder
    backbone = run.export()
    if run.world.rank == 0:
        recipe = plan.recipe
        images = Preprocessing.of(recipe.evaluate.size, recipe.evaluate.resize, recipe.data.channels)
        with exact_products():
            to_timm(backbone, recipe.backbone, folder.path / layout.EXPORT, images, plan.origin)
    summary = {"steps": step, "epochs": round(plan.at(step).epoch, 3), "images": step * plan.stream.batch}
    starts = dist.gather_objects(folder.begin_evaluation(summary))[0]
    scores = evaluations.final(run, backbone, step, starts)
    summary = scores | summary | {"wall_seconds": round(run.clock.seconds, 1)}
    folder.end(summary, run.clock.useful)
    folder.callbacks("end", summary)
    return summary


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
