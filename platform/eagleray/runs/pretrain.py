"""A pretraining run: the one place where data, method, optimiser, checkpoints, tracking and evaluation meet."""

import logging
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from eagleray import config
from eagleray.base import dist
from eagleray.base.errors import UserError
from eagleray.config.schedule import Progress
from eagleray.data.batch import Batch
from eagleray.data.loader import Loader
from eagleray.data.quarantine import Quarantine
from eagleray.engine import checkpoint
from eagleray.engine.export import to_timm
from eagleray.engine.loop import Step, fit
from eagleray.engine.world import World
from eagleray.methods.method import Classifier, Method
from eagleray.protocols.classifier import classifier
from eagleray.protocols.probes import ProbeSets, evaluate
from eagleray.runs import layout
from eagleray.runs import recipe as recipes
from eagleray.runs.build import build_method, build_optimizer, scaled_lr
from eagleray.runs.callbacks import Callbacks, RunView
from eagleray.runs.metrics import KNN_TOP1, LINEAR_TOP1, UNTRAINED
from eagleray.runs.monitor import Monitor
from eagleray.runs.plan import Plan, make_plan
from eagleray.runs.recipe import Recipe
from eagleray.runs.restore import pretrained
from eagleray.runs.run_dir import RunDir
from eagleray.runs.step_log import Clock, StepLog
from eagleray.runs.tracking import Tracking

log = logging.getLogger(__name__)

BANK = 2**17  # features of the kNN monitor at most, unless a recipe says so: a tenth of ImageNet-1k, the paper's


def pretrain(recipe: Recipe, world: World, *, tracking: Tracking, command: float = 0.0) -> dict[str, Any] | None:
    """Train, or continue, until the planned steps are taken, then evaluate and export.

    Returns the summary, or None when the run was asked to stop before. `command` is when the user's command was begun,
    in seconds since 1970. Raises UserError, Outage and Preempted.
    """
    params = config.flatten(config.to_plain(recipe))
    keep = recipe.checkpoint.keep
    with RunDir(recipe.out or "", world.rank, tracking, params, keep=keep, command=command) as folder:
        dist.gather_objects(None)  # nobody reads checkpoints before rank 0 has the folder for itself
        p = make_plan(recipe, patience=60 * recipe.data.patience)
        state = newest(folder, recipe)
        source = recipe.backbone.weights if state is None else None
        method = build_method(recipe, pretrained(source) if source else None)
        method.allocate(len(p.index))
        method.to(world.device)
        world.synchronise(method)
        optimizer = build_optimizer(recipe, method)
        parts = Parts(method, optimizer, watching(p, method, optimizer))
        state = restore(state, parts)
        step = folder.begin(state["step"], world.size)
        run = RunView(recipe, method, recipe.out or "", world.rank, world.size, world.device, p.steps)
        folder.callbacks = Callbacks(run)
        folder.callbacks("start", step)
        log.info("%s", describe(p, method, world))
        clock = Clock(time.monotonic() - state["seconds"], state["useful"])
        if step < p.steps:
            step = train(p, world, folder, parts, clock, step=step)
        if step < p.steps:
            log.info("stopped at step %d of %d; the same command continues", step, p.steps)
            return None
        summary = finish(p, world, folder, method, step) | {"wall_seconds": round(clock.seconds, 1)}
        folder.end(summary, clock.useful)
        folder.callbacks("end", summary)
        return summary


class Parts(NamedTuple):
    """What a checkpoint holds beside numbers."""

    method: Method
    optimizer: torch.optim.Optimizer
    monitor: Monitor


def watching(p: Plan, method: Method, optimizer: torch.optim.Optimizer) -> Monitor:
    m = p.recipe.monitor
    bank = m.bank or min(len(p.index) // 10, BANK)
    labelled = p.index.labelled and not isinstance(method, Classifier)  # whose images are mixed, and their labels
    return Monitor(method, optimizer, every=m.every, bank=bank, labelled=labelled, k=m.k, temperature=m.temperature)


def train(p: Plan, world: World, folder: RunDir, parts: Parts, clock: Clock, *, step: int) -> int:
    """Steps from `step` on; returns how many have been taken when the run is through or was asked to stop.

    Raises, after a checkpoint, UserError or Outage when the data cannot be read any more, and Preempted.
    """
    recipe = p.recipe
    loader = Loader(p.stream, rank=world.rank, ranks=world.size, workers=recipe.data.workers, device=world.device)
    samples = len(p.index) + len(p.index.bad)
    quarantine = Quarantine(folder.path / layout.QUARANTINE, samples=samples, limit=recipe.data.bad_limit)
    quarantine.add(p.index.bad, write=world.rank == 0)
    method, optimizer, monitor = parts
    monitor.step = step
    meter = StepLog(p, world, folder, quarantine, monitor, clock)
    lr = p.lr
    saved, kept = time.monotonic(), step
    for taken in training(recipe, world, method, optimizer, meter.feed(loader, step)):
        at, step = taken.at, taken.at.step + 1
        meter.add(taken)
        folder.callbacks("step", taken)
        every = recipe.evaluate.every * p.stream.steps_per_epoch
        look = bool(every) and step % every == 0 and step < p.steps
        if step % recipe.log_steps == 0 or look or step == p.steps:
            record = meter.flush(at, lr(at))
            if look:
                scores = between(p, method)
                folder.callbacks("evaluation", scores)
                record |= scores
                meter.since = time.perf_counter()
            tell(p, world, folder, record)
        minutes = (time.monotonic() - saved) / 60
        due = step - kept >= (recipe.checkpoint.steps or step + 1) or minutes > recipe.checkpoint.minutes
        if due and not folder.saving():
            save(folder, p, parts, step, clock)
            saved, kept = time.monotonic(), step
        meter.mark = time.perf_counter()
    if meter.values:  # the steps ended early
        tell(p, world, folder, meter.flush(p.at(step - 1), lr(p.at(step - 1))))
    if kept < step:
        save(folder, p, parts, step, clock)
    for problem in (*dist.gather_objects(folder.settle()), meter.problem):  # a rank that ends takes the others with it
        if problem:
            raise problem
    return step


def training(
    recipe: Recipe,
    world: World,
    method: Method,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[tuple[Progress, Batch]],
) -> Iterator[Step]:
    """The recipe's steps on these batches."""
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
        wrap=world.wrap,
    )


def tell(p: Plan, world: World, folder: RunDir, record: dict[str, Any]) -> None:
    folder.log(record)
    folder.callbacks("log", record)
    if world.rank == 0:
        world.show(record, p.steps)


def save(folder: RunDir, p: Plan, parts: Parts, step: int, clock: Clock) -> None:
    """Rank 0 saves for all: every rank holds the same weights, centres and moments."""
    if dist.rank() == 0:
        state = {
            "step": step,
            "seconds": clock.seconds,
            "useful": clock.useful,
            "digest": recipes.digest(p.recipe),
            "recipe": config.dump(p.recipe),
            "images": len(p.index),
        } | {name: part.state_dict() for name, part in parts._asdict().items()}
        folder.save(step, state)
        log.debug("saving step %d", step)
    folder.callbacks("checkpoint", step)


def newest(folder: RunDir, recipe: Recipe) -> dict[str, Any] | None:
    """The newest checkpoint of the run. Raises UserError when it was made with another recipe."""
    state = checkpoint.newest(folder.checkpoints, folder.scratch, patience=60 * recipe.data.patience)
    if len(set(dist.gather_objects(state and state["step"]))) > 1:
        raise RuntimeError("ranks found different checkpoints")  # of a disk that fails; a restart may mend it
    if state and state["digest"] != recipes.digest(recipe):
        raise UserError(f"{folder.out}: its checkpoints were made with another recipe")
    return state


def restore(state: dict[str, Any] | None, parts: Parts) -> dict[str, Any]:
    """Put a checkpoint back. Returns step and seconds so far, zero for a new run."""
    if state is None:
        return {"step": 0, "seconds": 0.0, "useful": 0.0}
    for name, part in parts._asdict().items():
        part.load_state_dict(state[name])
    return state


def finish(p: Plan, world: World, folder: RunDir, method: Method, step: int) -> dict[str, Any]:
    """Evaluate and export. Ranks share the work of the features."""
    scores = classified(p, method) if isinstance(method, Classifier) else compared(p, world, method)
    folder.callbacks("evaluation", scores)
    if world.rank == 0:
        if isinstance(method, Classifier):
            log.info(
                "%s", ", ".join(f"{n} {value:.2f} %" for n, value in scores.items()) or "no data.test: no accuracy"
            )
        to_timm(method.export(), p.recipe.backbone, folder.path / "export")
    return scores | {"steps": step, "epochs": round(p.at(step).epoch, 3), "images": step * p.stream.batch}


def between(p: Plan, method: Method) -> dict[str, float]:
    """What is evaluated while training goes on."""
    if isinstance(method, Classifier):
        return classified(p, method)
    sets = ProbeSets.of(p.index, p.test, p.recipe.evaluate.limit)
    return evaluate(method.export(), sets, p.recipe.evaluate, protocols=("knn",))


def classified(p: Plan, method: Classifier) -> dict[str, float]:
    """How the classifier does on the test set, if there is one."""
    if p.test is None:
        return {}
    e, device = p.recipe.evaluate, next(method.parameters()).device
    return classifier(method, p.test, size=e.size, resize=e.resize, device=device)


def compared(p: Plan, world: World, method: Method) -> dict[str, float]:
    """What frozen features are worth, beside those of an untrained backbone."""
    sets = ProbeSets.of(p.index, p.test, p.recipe.evaluate.limit)
    if not sets:
        log.info("no labels: nothing to evaluate")
    scores = evaluate(method.export(), sets, p.recipe.evaluate)
    fresh = evaluate(build_method(p.recipe).export().to(world.device), sets, p.recipe.evaluate)
    scores |= {name + UNTRAINED: fresh[name] for name in (KNN_TOP1, LINEAR_TOP1) if name in fresh}
    if world.rank == 0:
        for protocol in ("knn", "linear"):
            if sets and f"{protocol}/top1" in scores:
                top1, before = scores[f"{protocol}/top1"], scores[f"{protocol}/top1{UNTRAINED}"]
                how = sets.describe(p.recipe.evaluate, protocol)
                log.info("%s top-1 %.1f %%, untrained %.1f %% (%s)", protocol, top1, before, how)
    return scores


def describe(p: Plan, method: Method, world: World) -> str:
    trained = sum(x.numel() for x in method.export().parameters()) / 1e6
    return (
        f"{p.recipe.method.name} on {p.recipe.backbone.name} ({trained:.2f} M parameters), {world.size} rank"
        f"{'s' * (world.size > 1)} on {world.device.type}; {len(p.index)} images in {len(p.index.shards)} shards, "
        f"{p.steps} steps of {p.stream.batch} ({p.stream.steps_per_epoch} an epoch)"
    )
