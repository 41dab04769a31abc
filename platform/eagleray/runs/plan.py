"""Plan a run: open the data of a recipe, count the steps, and compute digests of all that determines the result.

The digests of recipe, data, order and code are stored in checkpoints, exports and starts.jsonl. When a result cannot be
reproduced, the digest that differs tells why."""

import contextlib
import functools
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

import eagleray
from eagleray.base import dist
from eagleray.base.errors import UserError, hide_secrets, named
from eagleray.config.plugins import PluginCopy
from eagleray.config.schedule import Progress, Schedule
from eagleray.config.source import Source
from eagleray.data import index_file
from eagleray.data.digests import LENGTH
from eagleray.data.index import Index, ScanAll, open_index, scan_here
from eagleray.data.index_of_ranks import open_on_all
from eagleray.data.reader import Stream
from eagleray.data.selection import Selection
from eagleray.protocols.digests import digest
from eagleray.runs import fit, layout
from eagleray.runs.build import scaled_lr
from eagleray.runs.recipe import Recipe, needs_boxes
from eagleray.runs.recipe import digest as recipe_digest
from eagleray.runs.run_store import run_store
from eagleray.runs.tracking import DataInput
from eagleray.storage import store
from eagleray.storage.block_cache import Cache
from eagleray.storage.retry import PATIENCE
from eagleray.views.sampling import Views

log = logging.getLogger(__name__)
DIGESTS = ("recipe", "data", "order", "code")


@dataclass(frozen=True)
class Plan:
    """A recipe with its opened data and its number of steps."""

    recipe: Recipe
    stream: Stream
    test: Index | None
    steps: int  # steps of the whole run; with `max_steps` they may be fewer than the schedules are made for
    forgotten: tuple[str, ...] = ()  # lines for the log about images that the run has forgotten

    @property
    def index(self) -> Index:
        return self.stream.index

    @property
    def lr(self) -> Schedule:
        return scaled_lr(self.recipe)

    @property
    def frozen_steps(self) -> float:
        """Return the number of first steps in which the backbone is not trained, from `start.freeze`."""
        return self.recipe.start.freeze * self.stream.steps_per_epoch if self.recipe.start else 0.0

    @functools.cached_property
    def origin(self) -> dict[str, str]:
        """Return, by name, the digests of recipe, data, order and code, which determine what the run learns."""
        values = recipe_digest(self.recipe), shards_digest(self.index), order_digest(self.stream), code_digest()
        return dict(zip(DIGESTS, values, strict=True))

    @functools.cached_property
    def shards_text(self) -> str:
        """Return the name, size and tag of each shard, a line each, so that a check can name a changed shard."""
        return "".join(f"{b.url.rpartition('/')[2]}\t{b.size} {b.tag}\n" for b in self.index.shards)

    @property
    def inputs(self) -> list[DataInput]:
        """Return the data sets of the run as MLflow shows them."""
        inputs = [data_input("training", self.recipe.data.sources(), self.index)]
        if self.test and self.recipe.data.test:
            inputs.append(data_input("test", self.recipe.data.test, self.test))
        return inputs

    def is_milestone(self, step: int) -> bool:
        """Return whether a step is the last one of an epoch whose checkpoint is kept for good."""
        wanted, (epoch, rest) = self.recipe.checkpoint.milestones, divmod(step, self.stream.steps_per_epoch)
        return not rest and (epoch % wanted == 0 if isinstance(wanted, int) else epoch in wanted)

    def at(self, step: int) -> Progress:
        return Progress(step, self.stream.steps_per_epoch, self.recipe.optim.epochs, self.recipe.seed)


def open_plan(
    recipe: Recipe,
    *,
    note: Callable[[str], None] = log.info,
    patience: float = PATIENCE,
    scan_all: ScanAll = scan_here,
    opening: Callable[..., Index] = open_index,
) -> Plan:
    """Open the data of a recipe that `make_plan` has checked, and count the steps. Called by all ranks together.

    Raises UserError when the data is missing or does not fill a batch, and Outage when it cannot be read for `patience`
    seconds."""
    from eagleray.runs.forgotten import read_forgotten, samples_of, told  # late: without a run it is not needed

    data = recipe.data
    if any(source.selects for source in data.test or ()):
        raise UserError("data.test: where, weight, exclude and share are for data.train")
    # An index that cannot be written beside the shards goes into the run's folder, where every machine finds it.
    opening = partial(opening, spare=recipe.out, note=note, patience=patience, scan_all=scan_all)
    opening = partial(opening, channels=data.channels)
    sources = data.sources()
    with named("data.train"):
        index = open_on_all(partial(opening, sources))
    forgotten = dist.from_rank_zero(lambda: read_forgotten(recipe.out))
    index = replace(index, forgotten=samples_of(index, forgotten))
    with named("data.test", "; name another, or none: data.test=null"):  # a shipped recipe may name a missing path
        test = open_on_all(partial(opening, data.test)) if data.test else None
    cache = Cache(Path(data.cache), data.cache_size) if data.cache else None
    views, batch = Views.of(recipe.views), recipe.optim.batch
    selection = dist.from_rank_zero(partial(_select, index))
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
    return Plan(recipe, stream, test, steps_of(recipe, stream), tuple(told(forgotten)))


@contextlib.contextmanager
def opened_again(recipe: Recipe) -> Iterator[Plan]:
    """A context with the plan of an existing run, without its test set, for a command that asks for its order of
    samples. Nothing is written into the run's folder. Raises what `open_plan` raises."""
    with TemporaryDirectory(prefix="eagleray-order-") as scratch:
        for blob in index_file.aside_in(recipe.out):  # indexes that could not be stored beside the data
            (Path(scratch) / index_file.name(blob)).write_bytes(store.store(recipe.out).get(blob.url))
        (Path(scratch) / layout.FORGOTTEN).write_text(run_store(recipe.out).get(layout.FORGOTTEN) or "")
        data = replace(recipe.data, test=None)
        yield open_plan(replace(recipe, out=scratch, data=data), note=lambda _: None)


def _select(index: Index) -> Selection | None:
    """Return which samples the sources of an index select, and how often each is read; None if they select nothing."""
    if not any(source.selects for source in index.sources):
        return None
    from eagleray.data.columns import select

    return select(index)


def steps_of(recipe: Recipe, stream: Stream) -> int:
    """Return the number of steps of a whole run, which `max_steps` of the recipe limits."""
    steps = recipe.optim.epochs * stream.steps_per_epoch
    return min(steps, recipe.max_steps or steps)


def shards_digest(index: Index) -> str:
    """Return the digest of the names, sizes and tags of all shards, and of how often each is read in an epoch. No row
    of the index is read for it."""
    shards = [(b.url.rpartition("/")[2], b.size, b.tag) for b in index.shards]
    return digest(shards, index.repeats.tolist())


def order_digest(stream: Stream) -> str:
    """Return the digest of all that decides which sample is read when."""
    blocks = hashlib.sha256(stream.visits.sizes.tobytes()).hexdigest()
    chosen = [stream.selection.digest] if stream.selection else []
    return digest(stream.seed, stream.lanes, stream.batch, blocks, *chosen)


@functools.cache
def code_digest() -> str:
    """Return the digest of the source files of this package."""
    folder = Path(eagleray.__file__).parent
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.py")}
    return PluginCopy(folder, files).sha256[:LENGTH]


def data_input(context: str, sources: Sequence[Source], index: Index) -> DataInput:
    """Return the description of a data set for MLflow. Its digest does not depend on the data set's folder."""
    urls = [hide_secrets(s.url) for s in sources]
    name = ", ".join("/".join(url.rstrip("/").split("/")[-2:]) for url in urls)
    used = np.diff(index.first).tolist()
    shards = [(b.url.rpartition("/")[2], b.size, b.tag) for b in index.shards]
    profile = {"images": len(index), "shards": len(index.shards), "labelled": bool(index.labelled)}
    return DataInput(
        context,
        name[:500],  # the longest name that MLflow stores
        digest(shards, used, index.repeats.tolist()),
        "local" if store.folder_of(urls[0]) else urls[0].partition("://")[0],
        json.dumps({"uri": urls[0] if len(urls) == 1 else ",".join(urls)})[:65_000],
        json.dumps(profile),
    )
