"""Plan a run: open a recipe's data, check that everything fits, and count the steps."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from eagleray.base.errors import UserError
from eagleray.config.schedule import Progress, Schedule
from eagleray.config.source import Source
from eagleray.data import labels
from eagleray.data.index import Index, open_index
from eagleray.data.loader import rows
from eagleray.data.reader import Stream
from eagleray.models import weights
from eagleray.runs import fit, remote
from eagleray.runs import recipe as recipes
from eagleray.runs.build import build_method, scaled_lr
from eagleray.runs.recipe import Recipe
from eagleray.storage import store
from eagleray.storage.block_cache import Cache
from eagleray.storage.retry import PATIENCE
from eagleray.views.sampling import Views

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """A recipe with its opened data and its number of steps."""

    recipe: Recipe
    stream: Stream
    test: Index | None
    steps: int  # of the whole run; with max_steps fewer than the schedules are made for

    @property
    def index(self) -> Index:
        return self.stream.index

    @property
    def lr(self) -> Schedule:
        return scaled_lr(self.recipe)

    def at(self, step: int) -> Progress:
        return Progress(step, self.stream.steps_per_epoch, self.recipe.optim.epochs)


def resolve_paths(recipe: Recipe) -> Recipe:
    """Return the recipe with absolute paths, as a worker's working folder is not the user's. Raises UserError."""

    def absolute(sources: tuple[Source, ...] | None) -> tuple[Source, ...] | None:
        return sources and tuple(replace(s, url=store.absolute(s.url)) for s in sources)

    if recipe.out and "://" in recipe.out and not recipe.out.startswith("s3://"):
        raise UserError(f"out={recipe.out}: expected a folder or an s3:// URL")
    cache = recipe.data.cache and store.absolute(recipe.data.cache)
    data = replace(recipe.data, train=absolute(recipe.data.train), test=absolute(recipe.data.test), cache=cache)
    source = recipe.backbone.weights and weights.absolute(recipe.backbone.weights)
    network = replace(recipe.backbone, weights=source)
    return replace(recipe, out=store.absolute((recipe.out or "runs/run").rstrip("/")), data=data, backbone=network)


def training_sources(recipe: Recipe) -> tuple[Source, ...]:
    """Return the sources of the training data. Raises UserError when the recipe names none."""
    if recipe.data.train is None:
        raise UserError("data.train: missing; expected a folder, glob, brace pattern or s3:// URL of shards")
    return recipe.data.train


def make_plan(recipe: Recipe, *, note: Callable[[str], None] = log.info, patience: float = PATIENCE) -> Plan:
    """Open the data and check that the recipe fits it.

    Raises UserError when something does not fit, and Outage when the data cannot be read for `patience` seconds.
    """
    train = training_sources(recipe)
    out = remote.work_dir(recipe.out or "")
    with torch.device("meta"):
        method = build_method(recipe)  # asked for what it needs of the run
    least, most = method.views
    views = Views.of(recipe.views)
    if not least <= len(views.views) <= most:
        count = f"{least}" if least == most else f"{least} to {most}"
        raise UserError(f"views: got {len(views.views)}, but {recipe.method.name} works with {count}")
    check_shares(recipe, method.norm_group)
    index = open_index(train, out, note=note, patience=patience)
    test = open_index(recipe.data.test, out, note=note, patience=patience) if recipe.data.test else None
    if method.classes is not None:
        labels.check_labels("data.train", index, method.classes, every=True)
        if test:
            labels.check_labels("data.test", test, method.classes, every=False)
    for key, data in ("data.test", test), ("data.train", index):
        if test and data and not data.labelled:
            raise UserError(f"{key}: has no labels; evaluation needs labels in both data.train and data.test")
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


def check_shares(recipe: Recipe, norm_group: int | None) -> None:
    """Check that every number of workers that the run may have can share the batch, and that `norm_group` divides each
    share.

    Raises UserError.
    """
    fewest, most = recipes.span(recipe.workers)
    for ranks in range(max(fewest, 1), max(most, 1) + 1):
        shares = rows(recipe.data.lanes, recipe.optim.batch, ranks=ranks, workers=recipe.data.workers)
        if norm_group and any(n % norm_group for n in shares):
            raise UserError(
                f"method.norm_group={norm_group}: expected a divisor of the number of images on every rank, {shares}"
            )
