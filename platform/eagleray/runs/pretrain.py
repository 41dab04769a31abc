"""A pretraining run: the one place where data, method, optimiser, checkpoints, tracking and evaluation meet."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from eagleray import config
from eagleray.base import dist
from eagleray.base.errors import UserError
from eagleray.config.schedule import Progress, Schedule
from eagleray.config.source import Source
from eagleray.data import labels
from eagleray.data.batch import Batch
from eagleray.data.index import Index, open_index
from eagleray.data.loader import Loader, rows
from eagleray.data.quarantine import Quarantine
from eagleray.data.reader import Stream
from eagleray.engine import checkpoint, optim
from eagleray.engine.export import to_timm
from eagleray.engine.loop import Step, fit
from eagleray.engine.world import World
from eagleray.methods.method import Classifier, Method
from eagleray.models.backbone import Backbone
from eagleray.protocols.classifier import classifier
from eagleray.protocols.probes import ProbeSets, evaluate
from eagleray.runs import recipe as recipes
from eagleray.runs import remote
from eagleray.runs import restore as weights
from eagleray.runs.monitor import Monitor
from eagleray.runs.recipe import Recipe
from eagleray.runs.run_dir import Folder
from eagleray.runs.step_log import Meter
from eagleray.runs.tracking import Tracking
from eagleray.storage import store
from eagleray.storage.block_cache import Cache
from eagleray.storage.retry import PATIENCE
from eagleray.views.sampling import Views

log = logging.getLogger(__name__)

BANK = 2**17  # features of the kNN monitor at most, unless a recipe says so: a tenth of ImageNet-1k, the paper's


@dataclass(frozen=True)
class Plan:
    """What a recipe means on its data."""

    recipe: Recipe
    stream: Stream
    test: Index | None
    steps: int  # to take in all; fewer than the schedules are made for, where max_steps says so

    @property
    def index(self) -> Index:
        return self.stream.index

    @property
    def lr(self) -> Schedule:
        return scaled(self.recipe)

    def at(self, step: int) -> Progress:
        return Progress(step, self.stream.steps_per_epoch, self.recipe.optim.epochs)


def resolve(recipe: Recipe) -> Recipe:
    """The recipe with absolute places, as a worker's working folder is not the user's."""

    def placed(given: tuple[Source, ...] | None) -> tuple[Source, ...] | None:
        return given and tuple(replace(s, url=store.absolute(s.url)) for s in given)

    if recipe.out and "://" in recipe.out and not recipe.out.startswith("s3://"):
        raise UserError(f"out={recipe.out}: expected a folder or an s3:// URL")
    cache = recipe.data.cache and store.absolute(recipe.data.cache)
    data = replace(recipe.data, train=placed(recipe.data.train), test=placed(recipe.data.test), cache=cache)
    source = recipe.backbone.weights and weights.absolute(recipe.backbone.weights)
    network = replace(recipe.backbone, weights=source)
    return replace(recipe, out=store.absolute((recipe.out or "runs/run").rstrip("/")), data=data, backbone=network)


def sources(recipe: Recipe) -> tuple[Source, ...]:
    """What is trained on. Raises UserError."""
    if recipe.data.train is None:
        raise UserError("data.train: missing; expected a folder, glob, brace pattern or s3:// URL of shards")
    return recipe.data.train


def plan(recipe: Recipe, *, note: Callable[[str], None] = log.info, patience: float = PATIENCE) -> Plan:
    """Open the data, waiting `patience` seconds for it, and check that everything fits. Raises UserError and Outage."""
    train = sources(recipe)
    out = remote.work(recipe.out or "")
    least, most = recipe.method.target.views  # type: ignore[attr-defined]
    views = Views.of(recipe.views)
    if not least <= len(views.views) <= most:
        raise UserError(f"views: {len(views.views)} given, {recipe.method.name} works with {least} to {most}")
    group = recipe.method.args.get("norm_group")
    fewest, widest = recipes.span(recipe.workers)
    for ranks in range(max(fewest, 1), max(widest, 1) + 1):
        shares = rows(recipe.data.lanes, recipe.optim.batch, ranks=ranks, workers=recipe.data.workers)
        if group and any(n % group for n in shares):
            raise UserError(f"method.norm_group={group}: expected a divisor of the images of every rank, {shares}")
    index = open_index(train, out, note=note, patience=patience)
    test = open_index(recipe.data.test, out, note=note, patience=patience) if recipe.data.test else None
    if issubclass(recipe.method.target, Classifier):
        classes = recipe.method.args["classes"]
        labels.check("data.train", index, classes, every=True)
        if test:
            labels.check("data.test", test, classes, every=False)
    for key, data in ("data.test", test), ("data.train", index):
        if test and data and not data.labelled:
            raise UserError(f"{key}: has no labels; evaluation with data.test needs them in both")
    cache = Cache(Path(recipe.data.cache), recipe.data.cache_size) if recipe.data.cache else None
    wait = 60 * recipe.data.patience
    stream = Stream(index, views, recipe.seed, recipe.data.lanes, recipe.optim.batch, cache, wait)
    steps = recipe.optim.epochs * stream.steps_per_epoch
    return Plan(recipe, stream, test, min(steps, recipe.max_steps or steps))


def build(recipe: Recipe, start: weights.Found | None = None) -> Method:
    """The method with fresh weights, the same wherever it is built; `start` replaces those of its backbone, before the
    method makes copies of it. Raises UserError."""
    torch.manual_seed(recipe.seed)
    network = backbone(recipe)
    if start:
        weights.fill(network, start)
    return recipe.method.build(network)  # type: ignore[no-any-return]


def backbone(recipe: Recipe) -> Backbone:
    """The backbone with fresh weights. Raises UserError."""
    network = Backbone(**{k: v for k, v in asdict(recipe.backbone).items() if k != "weights"})
    network.micro_batch = size = recipe.optim.micro_batch
    if size and any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in network.modules()):
        raise UserError(f"optim.micro_batch={size}: the batch norm of {recipe.backbone.name} needs the whole batch")
    return network


def try_sizes(recipe: Recipe) -> None:
    """Raises UserError when the method cannot be built, or its backbone cannot take a size that the recipe asks for."""
    with torch.device("meta"):
        method = build(recipe)
        o = recipe.optim
        optim.param_groups(method, decay=o.decay, constant=o.constant_lr, layer_decay=o.layer_decay)
        backbone = method.export()
        for size in sorted({v.size for v in recipe.views} | {recipe.evaluate.size}):
            try:
                found = backbone(torch.empty(2, 3, size, size)).pooled.shape[1]
            except Exception as e:
                raise UserError(f"backbone.name={recipe.backbone.name}: cannot take {size} pixel images: {e}") from None
            if found != backbone.dim:
                raise UserError(
                    f"backbone.name={recipe.backbone.name}: its {found} features are not its {backbone.dim}"
                )
        method.try_views([torch.empty(2, 3, v.size, v.size) for v in recipe.views])


def pretrain(recipe: Recipe, world: World, *, tracking: Tracking, command: float = 0.0) -> dict[str, Any] | None:
    """Train, or continue, until the planned steps are taken, then evaluate and export.

    Returns the summary, or None when the run was asked to stop before. `command` is when the user's command was begun,
    in seconds since 1970. Raises UserError, Outage and Preempted.
    """
    params = config.flat(config.plain(recipe))
    keep = recipe.checkpoint.keep
    with Folder(recipe.out or "", world.rank, tracking, params, keep=keep, command=command) as folder:
        dist.objects(None)  # nobody reads checkpoints before rank 0 has the folder for itself
        p = plan(recipe, patience=60 * recipe.data.patience)
        state = newest(folder, recipe)
        source = recipe.backbone.weights if state is None else None
        method = build(recipe, weights.read(source, build) if source else None)
        method.begin(len(p.index))
        method.to(world.device)
        world.synchronise(method)
        optimizer = make_optimizer(recipe, method)
        parts = Parts(method, optimizer, watching(p, method, optimizer))
        state = restore(state, parts)
        step = folder.begin(state["step"], world.size)
        log.info("%s", describe(p, method, world))
        clock = Clock(time.monotonic() - state["seconds"], state["useful"])
        if step < p.steps:
            step = train(p, world, folder, parts, clock, step=step)
        if step < p.steps:
            log.info("stopped at step %d of %d; the same command continues", step, p.steps)
            return None
        summary = finish(p, world, folder, method, step) | {"wall_seconds": round(clock.seconds, 1)}
        folder.end(summary, clock.useful)
        return summary


@dataclass
class Clock:
    """Times that a checkpoint carries, in seconds."""

    began: float  # on this machine's clock, as if nothing had been lost
    useful: float  # in steps that count

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began


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


def train(p: Plan, world: World, folder: Folder, parts: Parts, clock: Clock, *, step: int) -> int:
    """Steps from `step` on; returns how many have been taken when the run is through or was asked to stop.

    Raises, after a checkpoint, UserError or Outage when the data cannot be read any more, and Preempted.
    """
    recipe = p.recipe
    loader = Loader(p.stream, rank=world.rank, ranks=world.size, workers=recipe.data.workers, device=world.device)
    samples = len(p.index) + len(p.index.bad)
    quarantine = Quarantine(folder.path / "quarantine.jsonl", samples=samples, limit=recipe.data.bad_limit)
    quarantine.add(p.index.bad, write=world.rank == 0)
    method, optimizer, monitor = parts
    monitor.step = step
    meter = Meter(p, world, folder, quarantine, monitor, clock)
    lr = p.lr
    saved, kept = time.monotonic(), step
    for taken in training(recipe, world, method, optimizer, meter.feed(loader, step)):
        at, step = taken.at, taken.at.step + 1
        meter.add(taken)
        every = recipe.evaluate.every * p.stream.steps_per_epoch
        look = bool(every) and step % every == 0 and step < p.steps
        if step % recipe.log_steps == 0 or look or step == p.steps:
            record = meter.flush(at, lr(at))
            if look:
                record |= between(p, method)
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
    for problem in (*dist.objects(folder.settle()), meter.problem):  # a rank that ends takes the others with it
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
        lr=scaled(recipe),
        weight_decay=o.weight_decay,
        clip=o.clip,
        clip_each=o.clip_each,
        seed=recipe.seed,
        wrap=world.wrap,
    )


def tell(p: Plan, world: World, folder: Folder, record: dict[str, Any]) -> None:
    folder.log(record)
    if world.rank == 0:
        world.show(record, p.steps)


def make_optimizer(recipe: Recipe, method: Method) -> torch.optim.Optimizer:
    o, lr = recipe.optim, scaled(recipe).value
    return optim.make(
        o.name,
        method,
        decay=o.decay,
        momentum=o.momentum,
        constant=o.constant_lr,
        constant_lr=lr,
        layer_decay=o.layer_decay,
    )


def scaled(recipe: Recipe) -> Schedule:
    """The learning rate, linear in the batch where the recipe says what batch it is meant for."""
    lr, images = recipe.optim.lr, recipe.optim.lr_images
    return replace(lr, value=lr.value * recipe.optim.batch / images) if images else lr


def save(folder: Folder, p: Plan, parts: Parts, step: int, clock: Clock) -> None:
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


def newest(folder: Folder, recipe: Recipe) -> dict[str, Any] | None:
    """The newest checkpoint of the run. Raises UserError when it is of another recipe."""
    state = checkpoint.newest(folder.checkpoints, folder.scratch, patience=60 * recipe.data.patience)
    if len(set(dist.objects(state and state["step"]))) > 1:
        raise RuntimeError("ranks found different checkpoints")  # of a disk that fails; a restart may mend it
    if state and state["digest"] != recipes.digest(recipe):
        raise UserError(f"{folder.out}: its checkpoints are of another recipe")
    return state


def restore(state: dict[str, Any] | None, parts: Parts) -> dict[str, Any]:
    """Put a checkpoint back. Returns step and seconds so far, zero for a new run."""
    if state is None:
        return {"step": 0, "seconds": 0.0, "useful": 0.0}
    for name, part in parts._asdict().items():
        part.load_state_dict(state[name])
    return state


def finish(p: Plan, world: World, folder: Folder, method: Method, step: int) -> dict[str, Any]:
    """Evaluate and export. Ranks share the work of the features."""
    scores = classified(p, method) if isinstance(method, Classifier) else compared(p, world, method)
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
    fresh = evaluate(build(p.recipe).export().to(world.device), sets, p.recipe.evaluate)
    scores |= {f"{name}_untrained": fresh[name] for name in ("knn/top1", "linear/top1") if name in fresh}
    if world.rank == 0:
        for protocol in ("knn", "linear"):
            if sets and f"{protocol}/top1" in scores:
                top1, before = scores[f"{protocol}/top1"], scores[f"{protocol}/top1_untrained"]
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
