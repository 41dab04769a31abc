"""Pretrain a recipe on one rank: join data, method, optimiser, checkpoints, tracking and evaluation."""

import logging
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from eagleray import config
from eagleray.base import dist, shards
from eagleray.base.allocator import keep_freed_memory
from eagleray.base.devices import is_accelerator
from eagleray.base.errors import UserError
from eagleray.config.schedule import Progress
from eagleray.data.batch import Batch
from eagleray.data.loader import Loader
from eagleray.data.quarantine import Quarantine
from eagleray.engine import checkpoint, sharded, sharded_checkpoint
from eagleray.engine.compiling import compile_backbones, compiles
from eagleray.engine.export import to_timm
from eagleray.engine.loop import Step, fit
from eagleray.engine.numerics import numerics
from eagleray.engine.precision import Precision
from eagleray.engine.world import World
from eagleray.methods.method import Classifier, Method
from eagleray.models.backbone import Backbone
from eagleray.protocols.classifier import classifier
from eagleray.protocols.probes import ProbeSets, evaluate
from eagleray.runs import layout
from eagleray.runs import recipe as recipes
from eagleray.runs.auto_micro_batch import choose_micro_batch, set_micro_batch
from eagleray.runs.build import build_method, build_optimizer, scaled_lr
from eagleray.runs.cadence import Cadence
from eagleray.runs.callbacks import Callbacks, RunView
from eagleray.runs.memory import explain_exhaustion
from eagleray.runs.metrics import KNN_TOP1, LINEAR_TOP1, UNTRAINED
from eagleray.runs.monitor import Monitor
from eagleray.runs.plan import Plan, open_plan
from eagleray.runs.profile import profiled
from eagleray.runs.recipe import Recipe
from eagleray.runs.restore import pretrained
from eagleray.runs.run_dir import RunDir
from eagleray.runs.step_log import Clock, StepLog
from eagleray.runs.tracking import Tracking

log = logging.getLogger(__name__)


class Stateful(NamedTuple):
    """The objects whose state a checkpoint holds. A field's name is the key in the checkpoint."""

    method: Method
    optimizer: torch.optim.Optimizer
    monitor: Monitor
    precision: Precision


class RankRun(NamedTuple):
    """The objects that one rank needs to train a run."""

    plan: Plan
    world: World
    folder: RunDir
    stateful: Stateful
    clock: Clock

    @property
    def method(self) -> Method:
        return self.stateful.method

    @property
    def sharded(self) -> bool:
        """Whether each rank has only a part of the weights."""
        return shards.sharded(next(self.method.parameters()))

    def export(self) -> Backbone:
        """Return the backbone to evaluate and export, whole. Called by all ranks together."""
        if not self.sharded:
            return self.method.export()
        backbone = build_method(self.plan.recipe).export()
        backbone.load_state_dict(sharded.whole_state(self.method.export()))
        return backbone.to(self.world.device)


def pretrain(recipe: Recipe, world: World, *, tracking: Tracking, command: float = 0.0) -> dict[str, Any] | None:
    """Train a run, or continue it, until the planned steps are taken, then evaluate and export.

    Returns the summary, or None when the run was asked to stop before its end. `command` is the time at which the
    user's command started, in seconds since 1970. Raises UserError, Outage and Preempted.
    """
    precision = Precision.of(recipe.precision, world.device)
    compiles(recipe.compile, world.device)  # before anything starts
    if not is_accelerator(world.device):
        keep_freed_memory()
    with (
        numerics(precision, deterministic=recipe.deterministic),
        RunDir(recipe, world.rank, tracking, command=command) as folder,
    ):
        dist.gather_objects(None)  # nobody reads checkpoints before rank 0 has the folder for itself
        plan = open_plan(recipe, patience=60 * recipe.data.patience)
        state = newest_checkpoint(folder)
        stateful = build_stateful(plan, world, precision, pretrained_weights=state is None)
        state = load_checkpoint(state, stateful)
        step = folder.begin(state["step"], world.size)
        view = RunView(recipe, stateful.method, recipe.out, world.rank, world.size, world.device, plan.steps)
        folder.callbacks = Callbacks(view)
        folder.callbacks("start", step)
        run = RankRun(plan, world, folder, stateful, Clock(time.monotonic() - state["seconds"], state["useful"]))
        log.info("%s", describe(run))
        if step < plan.steps:
            with explain_exhaustion(recipe, run.method, world.size):
                step = train(run, step)
        if step < plan.steps:
            log.info("stopped at step %d of %d; the same command continues", step, plan.steps)
            return None
        return finish(run, step)


def build_stateful(plan: Plan, world: World, precision: Precision, *, pretrained_weights: bool) -> Stateful:
    """Build method, optimiser and monitor on the rank's device. With `pretrained_weights` the backbone starts from
    `backbone.weights`."""
    source = plan.recipe.backbone.weights if pretrained_weights else None
    method = build_method(plan.recipe, pretrained(source) if source else None)
    method.allocate(len(plan.index))
    place(method, plan.recipe, world)
    optimizer = build_optimizer(plan.recipe, method)
    labelled = plan.index.labelled and not method.supervised  # its images are mixed, and so are their labels
    monitor = Monitor(method, optimizer, plan.recipe.monitor, images=len(plan.index), labelled=labelled)
    return Stateful(method, optimizer, monitor, precision)


def place(method: Method, recipe: Recipe, world: World) -> None:
    """Move a method to the rank's device, and synchronise, shard or compile it as the recipe says."""
    method.to(world.device)
    if is_accelerator(world.device) and method.export().batch_norm:
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
    loader = Loader(
        plan.stream, rank=world.rank, ranks=world.size, workers=plan.recipe.data.workers, device=world.device
    )
    if plan.recipe.optim.micro_batch == "auto":
        size = choose_micro_batch(plan.recipe, stateful.method, stateful.precision, plan.at(start), loader.rows)
        set_micro_batch(stateful.method, size)
        stateful.monitor.forget()
    stateful.monitor.step = step = start
    step_log = StepLog(plan, world, folder, open_quarantine(run), stateful.monitor, clock)
    cadence = Cadence(plan, start)
    batches = step_log.feed(loader, start)
    if plan.recipe.profile and world.rank == 0:
        batches = profiled(batches, plan.recipe.profile, folder.path, world.device)
    for taken in optimizer_steps(plan.recipe, world, stateful.method, stateful.optimizer, batches, stateful.precision):
        step = taken.at.step + 1
        step_log.add(taken)
        folder.callbacks("step", taken)
        if cadence.records(step):
            write_record(run, step_log, taken.at, evaluation=cadence.evaluates(step))
        if same_on_all(run, cadence.saves(step) and not folder.saving()):
            save_checkpoint(run, step)
            cadence.saved(step)
        step_log.mark = time.perf_counter()
    if step_log.values:  # the steps ended early
        write_record(run, step_log, plan.at(step - 1), evaluation=False)
    if cadence.saved_step < step:
        save_checkpoint(run, step)
    for problem in (
        *dist.gather_objects(folder.settle()),
        step_log.problem,
    ):  # a rank that ends takes the others with it
        if problem:
            raise problem
    return step


def same_on_all(run: RankRun, decision: bool) -> bool:
    """Return the decision of rank 0 where all ranks save together, which is where weights are sharded."""
    if not run.sharded:
        return decision
    return run.world.agree(decision and run.world.rank == 0)[0] > 0


def open_quarantine(run: RankRun) -> Quarantine:
    """Return the list of bad samples. It starts with those that were found when the data was indexed."""
    index = run.plan.index
    quarantine = Quarantine(
        run.folder.path / layout.QUARANTINE,
        samples=len(index) + len(index.bad),
        limit=run.plan.recipe.data.bad_limit,
    )
    quarantine.add(index.bad, write=run.world.rank == 0)
    return quarantine


def optimizer_steps(
    recipe: Recipe,
    world: World,
    method: Method,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[tuple[Progress, Batch]],
    precision: Precision | None = None,
) -> Iterator[Step]:
    """Train on these batches with the recipe's settings, and yield each optimiser step. Raises UserError when the
    device does not compute in the recipe's precision."""
    o = recipe.optim
    return fit(
        method,
        batches,
        optimizer,
        lr=scaled_lr(recipe),
        weight_decay=o.weight_decay,
        clip=o.clip,
        clip_each=o.clip_each,
        seed=recipe.seed,
        wrap=partial(world.wrap, reduce=o.reduce),
        precision=precision or Precision.of(recipe.precision, world.device),
    )


def write_record(run: RankRun, step_log: StepLog, at: Progress, *, evaluation: bool) -> None:
    """Write a line of metrics.jsonl with the means since the last line. With `evaluation`, evaluate first and add
    the scores."""
    record = step_log.flush(at, run.plan.lr(at))
    if evaluation:
        with explain_exhaustion(run.plan.recipe, run.method, run.world.size, evaluating=True):
            scores = evaluate_online(run)
        run.folder.callbacks("evaluation", scores)
        record |= scores
        step_log.since = time.perf_counter()  # the time of an evaluation is not that of steps
    run.folder.log(record)
    run.folder.callbacks("log", record)
    if run.world.rank == 0:
        run.world.show(record, run.plan.steps)


def newest_checkpoint(folder: RunDir) -> dict[str, Any] | None:
    """Return the newest checkpoint of the run, or None. Raises UserError when it was made with another recipe."""
    whole = folder.recipe.parallel == "ddp" or dist.size() == 1
    patience = 60 * folder.recipe.data.patience
    state = checkpoint.newest(folder.checkpoints, folder.scratch, patience=patience, whole=whole)
    if len(set(dist.gather_objects(state and state["step"]))) > 1:
        raise RuntimeError("ranks read different checkpoints")  # of a disk that fails; a restart may mend it
    if state and state["digest"] != recipes.digest(folder.recipe):
        raise UserError(f"{folder.out}: its checkpoints were made with another recipe")
    return state


def load_checkpoint(state: dict[str, Any] | None, stateful: Stateful) -> dict[str, Any]:
    """Load a checkpoint into the objects and return it. Without a checkpoint return the step and the seconds of a
    run that has not begun."""
    if state is None:
        return {"step": 0, "seconds": 0.0, "useful": 0.0}
    parts = stateful._asdict()
    if shards.sharded(next(stateful.method.parameters())):
        read = partial(sharded_checkpoint.read_rows, Path(state.get("shards", "")))
        sharded.load(parts.pop("method"), parts.pop("optimizer"), state, read)
    for name, part in parts.items():
        part.load_state_dict(state.get(name, {}) if name == "precision" else state[name])  # older ones lack it
    return state


def save_checkpoint(run: RankRun, step: int) -> None:
    """Save a checkpoint in the background. Only rank 0 saves, as every rank holds the same weights and moments, unless
    these are sharded."""
    if dist.rank() == 0 or run.sharded:
        state = {
            "step": step,
            "seconds": run.clock.seconds,
            "useful": run.clock.useful,
            "digest": recipes.digest(run.plan.recipe),
            "recipe": config.dump(run.plan.recipe),
            "images": len(run.plan.index),
        } | {name: part.state_dict() for name, part in run.stateful._asdict().items()}
        state["optimizer"] = sharded.optimizer_state(run.stateful.optimizer)
        run.folder.save(step, state)
        log.debug("saving step %d", step)
    run.folder.callbacks("checkpoint", step)


def finish(run: RankRun, step: int) -> dict[str, Any]:
    """Evaluate and export the backbone, then write and return the run's summary."""
    plan = run.plan
    with explain_exhaustion(plan.recipe, run.method, run.world.size, evaluating=True):
        scores = evaluate_final(run)
    run.folder.callbacks("evaluation", scores)
    backbone = run.export()
    if run.world.rank == 0:
        to_timm(backbone, plan.recipe.backbone, run.folder.path / layout.EXPORT)
    summary = scores | {"steps": step, "epochs": round(plan.at(step).epoch, 3), "images": step * plan.stream.batch}
    summary |= {"wall_seconds": round(run.clock.seconds, 1)}
    run.folder.end(summary, run.clock.useful)
    run.folder.callbacks("end", summary)
    return summary


def evaluate_online(run: RankRun) -> dict[str, float]:
    """Return the scores of an evaluation during training: a classifier is measured on the test set, every other
    backbone by kNN."""
    if isinstance(run.method, Classifier):
        return evaluate_classifier(run.plan, run.method)
    plan = run.plan
    sets = ProbeSets.of(plan.index, plan.test, plan.recipe.evaluate.limit)
    return evaluate(run.export(), sets, plan.recipe.evaluate, protocols=("knn",), precision=plan.recipe.precision)


def evaluate_final(run: RankRun) -> dict[str, float]:
    """Return the scores at the end of the run, and log them. All ranks extract features together."""
    if not isinstance(run.method, Classifier):
        return compare_with_untrained(run)
    scores = evaluate_classifier(run.plan, run.method)
    if run.world.rank == 0:
        line = ", ".join(f"{name} {value:.2f} %" for name, value in scores.items())
        log.info("%s", line or "no data.test: no accuracy")
    return scores


def evaluate_classifier(plan: Plan, method: Classifier) -> dict[str, float]:
    """Return the classifier's scores on the test set, if there is one."""
    if plan.test is None:
        return {}
    e, device = plan.recipe.evaluate, next(method.parameters()).device
    return classifier(method, plan.test, size=e.size, resize=e.resize, device=device, precision=plan.recipe.precision)


def compare_with_untrained(run: RankRun) -> dict[str, float]:
    """Return the scores of the frozen features, and those of an untrained backbone beside them."""
    recipe = run.plan.recipe
    sets = ProbeSets.of(run.plan.index, run.plan.test, recipe.evaluate.limit)
    if not sets:
        log.info("no labels: nothing to evaluate")
    scores = evaluate(run.export(), sets, recipe.evaluate, precision=recipe.precision)
    random = build_method(recipe).export().to(run.world.device)
    untrained = evaluate(random, sets, recipe.evaluate, precision=recipe.precision)
    scores |= {name + UNTRAINED: untrained[name] for name in (KNN_TOP1, LINEAR_TOP1) if name in untrained}
    for protocol, key in ("knn", KNN_TOP1), ("linear", LINEAR_TOP1):
        if run.world.rank == 0 and sets and key in scores:
            settings = sets.describe(recipe.evaluate, protocol)
            log.info(
                "%s top-1 %.1f %%, untrained %.1f %% (%s)", protocol, scores[key], scores[key + UNTRAINED], settings
            )
    return scores


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
