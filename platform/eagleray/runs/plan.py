"""A plan is what a recipe means on its data: the stream, the test set and the number of steps."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from eagleray.base.errors import UserError
from eagleray.config.schedule import Progress, Schedule
from eagleray.config.source import Source
from eagleray.data import labels
from eagleray.data.index import Index, open_index
from eagleray.data.loader import rows
from eagleray.data.reader import Stream
from eagleray.methods.method import Classifier
from eagleray.models import weights
from eagleray.runs import fit, remote
from eagleray.runs import recipe as recipes
from eagleray.runs.build import scaled_lr
from eagleray.runs.recipe import Recipe
from eagleray.storage import store
from eagleray.storage.block_cache import Cache
from eagleray.storage.retry import PATIENCE
from eagleray.views.sampling import Views

log = logging.getLogger(__name__)


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
        return scaled_lr(self.recipe)

    def at(self, step: int) -> Progress:
        return Progress(step, self.stream.steps_per_epoch, self.recipe.optim.epochs)


def resolve_paths(recipe: Recipe) -> Recipe:
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


def training_sources(recipe: Recipe) -> tuple[Source, ...]:
    """What is trained on. Raises UserError."""
    if recipe.data.train is None:
        raise UserError("data.train: missing; expected a folder, glob, brace pattern or s3:// URL of shards")
    return recipe.data.train


def make_plan(recipe: Recipe, *, note: Callable[[str], None] = log.info, patience: float = PATIENCE) -> Plan:
    """Open the data, waiting `patience` seconds for it, and check that everything fits. Raises UserError and Outage."""
    train = training_sources(recipe)
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
        labels.check_labels("data.train", index, classes, every=True)
        if test:
            labels.check_labels("data.test", test, classes, every=False)
    for key, data in ("data.test", test), ("data.train", index):
        if test and data and not data.labelled:
            raise UserError(f"{key}: has no labels; evaluation with data.test needs them in both")
    cache = Cache(Path(recipe.data.cache), recipe.data.cache_size) if recipe.data.cache else None
    wait = 60 * recipe.data.patience
    stream = Stream(index, views, recipe.seed, recipe.data.lanes, recipe.optim.batch, cache, wait)
    images = int(stream.sizes.sum())
    if images < recipe.optim.batch:
        raise fit.too_small(recipe, images)
    if queue := fit.long_queue(recipe, images):
        note(queue)
    steps = recipe.optim.epochs * stream.steps_per_epoch
    return Plan(recipe, stream, test, min(steps, recipe.max_steps or steps))
