"""Plan a run: open a recipe's data, check that everything fits, and count the steps."""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from eagleray.base import dist
from eagleray.base.errors import UserError
from eagleray.config.schedule import Progress, Schedule
from eagleray.config.source import Source
from eagleray.data import labels
from eagleray.data.columns import select
from eagleray.data.index import Index, ScanAll, open_index, scan_here
from eagleray.data.index_of_ranks import open_on_all
from eagleray.data.order import rows
from eagleray.data.reader import Stream
from eagleray.engine.sharded import check_shardable
from eagleray.methods.method import Method
from eagleray.models.shuffle_bn import check_groups
from eagleray.protocols.class_names import check_class_names
from eagleray.runs import fit, origin
from eagleray.runs.build import check_method, scaled_lr
from eagleray.runs.recipe import TEACHER, Recipe, digest, needs_boxes
from eagleray.runs.sources import absolute as absolute_source
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
    steps: int  # steps of the whole run; with max_steps fewer than the schedules are made for

    @property
    def index(self) -> Index:
        return self.stream.index

    @property
    def lr(self) -> Schedule:
        return scaled_lr(self.recipe)

    @property
    def frozen_steps(self) -> float:
        """Return the steps in which the backbone stays as it is: `start.freeze`."""
        return self.recipe.start.freeze * self.stream.steps_per_epoch if self.recipe.start else 0.0

    @functools.cached_property
    def origin(self) -> dict[str, str]:
        """Return the digests of recipe, data, order and code by name, from which everything that the run learns
        follows."""
        values = digest(self.recipe), origin.shards_digest(self.index), origin.order_digest(self.stream)
        return dict(zip(origin.DIGESTS, (*values, origin.code_digest()), strict=True))

    @functools.cached_property
    def shards_text(self) -> str:
        """Return the name, size and tag of each shard."""
        return origin.shards_text(self.index)

    def at(self, step: int) -> Progress:
        return Progress(step, self.stream.steps_per_epoch, self.recipe.optim.epochs, self.recipe.seed)


def resolve_paths(recipe: Recipe) -> Recipe:
    """Return the recipe with absolute paths, as a worker's working folder is not the user's. Raises UserError."""

    def absolute(sources: tuple[Source, ...] | None) -> tuple[Source, ...] | None:
        return sources and tuple(
            replace(
                s,
                url=store.absolute(s.url),
                exclude=s.exclude and store.absolute(s.exclude),
                columns=tuple(map(store.absolute, s.columns)),
            )
            for s in sources
        )

    store.check_writable(recipe.out, "out")
    cache = recipe.data.cache and store.absolute(recipe.data.cache)
    data = replace(recipe.data, train=absolute(recipe.data.train), test=absolute(recipe.data.test), cache=cache)
    source = recipe.backbone.weights and absolute_source(recipe.backbone.weights)
    network = replace(recipe.backbone, weights=source)
    start = recipe.start and recipe.start.at(absolute_source(recipe.start.source))
    out, method = store.absolute(recipe.out.rstrip("/")), recipe.method
    if teacher := recipe.teacher:
        if teacher.weights is None:
            raise UserError(f"{TEACHER}: missing; expected what start.from may name: a run, an export, timm:NAME, ...")
        named = replace(teacher, weights=absolute_source(teacher.weights))
        method = replace(method, args=method.args | {"teacher": named})
    return replace(recipe, out=out, data=data, backbone=network, start=start, method=method)


def make_plan(recipe: Recipe, *, note: Callable[[str], None] = log.info, scan_all: ScanAll = scan_here) -> Plan:
    """Check that the recipe, its method and its data fit each other, and open the data; `scan_all` reads tars that have
    no index. Raises as `open_plan`, and UserError when something does not fit."""
    method = check_method(recipe)
    check_shares(recipe, method.norm_group)
    check_parallel(recipe, method)
    check_start(recipe, method)
    plan = open_plan(recipe, note=note, scan_all=scan_all)
    index, test = plan.index, plan.test
    if queue := fit.long_queue(recipe, plan.stream.samples_per_epoch):
        note(queue)
    chosen = plan.stream.selection
    if chosen and chosen.kept < len(chosen.weight) and type(method).allocate is not Method.allocate:
        raise UserError(
            f"data.train: leaves out {len(chosen.weight) - chosen.kept:,} of {len(chosen.weight):,} samples, but "
            f"{recipe.method.name} has a vector for each and would compare with those that are never read; expected "
            "shards of the chosen ones: eagleray prepare webdataset --where"
        )
    if method.classes is not None:
        labels.check_labels("data.train", index, method.classes, every=True)
        if test:
            labels.check_labels("data.test", test, method.classes, every=False)
    for key, data in ("data.test", test), ("data.train", index):
        unread = labels.unread_labels(data) if test and data else ""
        if test and data and not data.labelled and (test.labelled or index.labelled):
            why = f": {unread}" * bool(unread)
            both = "evaluation needs labels in both data.train and data.test, or none"
            raise UserError(f"{key}: has no labels{why}; {both}")
        if unread:
            note(f"{key}: {unread}; evaluation leaves them out")
    if test:
        try:
            check_class_names(index, test, ("data.train", "data.test"))
        except UserError as e:
            if method.classes is not None:
                raise
            note(f"{e}; the scores of this run compare the numbers")
    return plan


def check_parallel(recipe: Recipe, method: Method) -> None:
    """Raises UserError when FSDP is to divide the weights of a method that is not tested with it, or when a key works
    with whole weights on every rank alone."""
    if recipe.parallel == "ddp":
        return
    check_shardable(method, recipe.method.name)
    for key in keys_of_whole_weights(recipe):
        raise UserError(f"parallel=fsdp: does not work with {key}; leave it out, or use parallel=ddp")


def check_start(recipe: Recipe, method: Method) -> None:
    """Raises UserError when keys of the recipe exclude its `start`."""
    if recipe.start is None:
        return
    given = f"start.from={recipe.start.source}"
    if recipe.backbone.weights:
        raise UserError(f"{given}: backbone.weights names other weights; give one of the two")
    if method.supervised:
        raise UserError(f"{given}: {recipe.method.name} learns from labels; backbone.weights is for fine-tuning")
    if recipe.start.freeze and recipe.start.what == "all":
        raise UserError("start.freeze: does not work with start.what=all, whose heads need not be warmed; use method")
    if recipe.start.freeze >= recipe.optim.epochs:
        raise UserError(
            f"start.freeze={recipe.start.freeze:g}: the backbone would never be trained, with "
            f"optim.epochs={recipe.optim.epochs}"
        )
    if recipe.start.anchor and recipe.parallel == "fsdp":
        raise UserError("start.anchor: does not work with parallel=fsdp, which divides the weights; use parallel=ddp")
    if recipe.start.what == "all" and recipe.parallel == "fsdp":
        raise UserError("start.what=all: does not work with parallel=fsdp, which divides the moments; use method")


def keys_of_whole_weights(recipe: Recipe) -> list[str]:
    """Return the keys of a recipe that work with whole weights on every rank alone."""
    optim = recipe.optim
    keys = {"optim.micro_batch=auto": optim.micro_batch == "auto", "optim.reduce=bf16": optim.reduce == "bf16"}
    return [key for key, given in (keys | {"compile=true": recipe.compile is True}).items() if given]


def open_plan(
    recipe: Recipe,
    *,
    note: Callable[[str], None] = log.info,
    patience: float = PATIENCE,
    scan_all: ScanAll = scan_here,
) -> Plan:
    """Open the data of a recipe that `make_plan` has checked, and count the steps. Called by all ranks together.

    Raises UserError when the data is missing or does not fill a batch, and Outage when it cannot be read for `patience`
    seconds."""
    data = recipe.data
    if any(source.selects for source in data.test or ()):
        raise UserError("data.test: where, weight, exclude and share are for data.train")
    # In the run's folder, whichever machine goes on: where nothing can be written beside the shards.
    opening = partial(open_index, spare=recipe.out, note=note, patience=patience, scan_all=scan_all)
    opening = partial(opening, channels=data.channels)
    sources = data.sources()
    try:
        index = open_on_all(partial(opening, sources))
    except UserError as e:
        raise UserError(f"data.train: {e}") from None
    try:
        test = open_on_all(partial(opening, data.test)) if data.test else None
    except UserError as e:  # the recipe may name the place, and nobody typed it
        raise UserError(f"data.test: {e}; name another, or none: data.test=null") from None
    cache = Cache(Path(data.cache), data.cache_size) if data.cache else None
    views, batch = Views.of(recipe.views), recipe.optim.batch
    selection = dist.from_rank_zero(partial(select, index))
    patient, scaled = 60 * data.patience, data.decode == "scaled"
    phases = tuple((phase.until, Views.of(phase.views)) for phase in recipe.phases[:-1])
    stream = Stream(
        index,
        views,
        recipe.seed,
        data.lanes,
        batch,
        cache,
        patient,
        selection=selection,
        scaled=scaled,
        phases=phases,
        boxes=needs_boxes(recipe),
    )
    if (images := stream.samples_per_epoch) < recipe.optim.batch:
        raise fit.too_small(recipe, images)
    return Plan(recipe, stream, test, steps_of(recipe, stream))


def steps_of(recipe: Recipe, stream: Stream) -> int:
    """Return the steps of a whole run."""
    steps = recipe.optim.epochs * stream.steps_per_epoch
    return min(steps, recipe.max_steps or steps)


def check_shares(recipe: Recipe, norm_group: int | None) -> None:
    """Check that every number of processes that the run may have can share the batch, and that groups of `norm_group`
    images fit their shares.

    Raises UserError.
    """
    least, most = recipe.ranks
    for ranks in range(least, most + 1):
        shares = rows(recipe.data.lanes, recipe.optim.batch, ranks=ranks)
        if norm_group:
            check_groups(norm_group, shares)
