"""Define a recipe, the settings of a pretraining run. Units are in the comments."""

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from eagleray import config
from eagleray.base.errors import UserError
from eagleray.config import STRICT, Part, part_of, register
from eagleray.config import plugins as loading
from eagleray.config.channels import RGB, Channels, check_operations, planes
from eagleray.config.curriculum import Phase, PhaseViews, phases
from eagleray.config.plugins import Plugin
from eagleray.config.schedule import Schedule
from eagleray.config.source import Source, Sources
from eagleray.config.types import Bytes, Format, ModelName, Share
from eagleray.config.view import View, check_views
from eagleray.models.network import Network, TrainedNetwork
from eagleray.protocols.settings import Evaluate
from eagleray.storage.hf_urls import unpinned

if TYPE_CHECKING:
    Method = Part
else:
    Method = part_of("eagleray.methods")


def span(workers: int | str) -> tuple[int, int]:
    """Return the fewest and the most workers that a run may have, from `4..16` or from one number. Raises ValueError
    for anything else."""
    match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", str(workers))
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (-1, -1)
    if not (0 < least <= most or least == most == 0):
        raise ValueError("expected a number of workers, or the fewest and the most, such as 4..16")
    return least, most


def _workers(value: int | str) -> int | str:
    least, most = span(value)
    return most if least == most else f"{least}..{most}"


def _steps(value: str | None) -> str | None:
    if value is not None:
        steps(value)
    return value


def steps(text: str) -> tuple[int, int]:
    """Return the first and the last of the steps in a text such as `10..12`. Raises ValueError for other texts."""
    match = re.fullmatch(r"(\d+)\.\.(\d+)", text)
    if not match or not 0 < int(match[1]) <= int(match[2]):
        raise ValueError("expected the first and the last step, such as 10..12")
    return int(match[1]), int(match[2])


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Data:
    # Images to train on: a folder, glob or brace pattern, local or by URL; a mapping of url, repeat, where and weight;
    # or a list of these
    train: Sources | None = None
    # Labelled images for the evaluations; None: a tenth of the labelled training images is held out
    test: Sources | None = None
    # Number of equal slices of a global batch, each read from its own part of the data; must divide optim.batch
    lanes: PositiveInt = 64
    # Loader processes per rank; 0: in the training process; auto: two fewer than the CPUs of the rank
    workers: NonNegativeInt | Literal["auto"] = 4
    # scaled: decode a JPEG at 1/2, 1/4 or 1/8 of its size if every crop is scaled down at least that much
    decode: Literal["full", "scaled"] = "full"
    # Where crops are cut and resized, with the same pixels. auto: on an accelerator that can, unless a view has
    # randaugment or operations (docs/data.md#where-crops-are-made)
    crops: Literal["auto", "cpu", "device"] = "auto"
    # Mean and std of each channel, as `eagleray data stats --channels` prints them; none: red, green and blue
    channels: Channels = ()
    bad_limit: Share = 0.01  # the run stops when a larger share of the samples is broken
    cache: str | None = None  # folder on each node's own disk that keeps what was fetched
    cache_size: Bytes = 100 * 2**30  # largest size of that folder
    # Minutes for which the store may fail to answer before the run saves a checkpoint and stops
    patience: Annotated[float, Field(gt=0)] = 10.0

    def sources(self) -> tuple[Source, ...]:
        """Return the sources of the training data. Raises UserError when the recipe names none."""
        if self.train is None:
            raise UserError(
                "data.train: missing; name a folder of images, or a folder, glob, brace pattern or s3:// URL of "
                "shards, such as data.train=photos/"
            )
        return self.train


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Optim:
    # lars: trust coefficient 0.001 on matrices, as in MoCo v3; larc: the same on every tensor, with the decay in it, as
    # in SwAV
    name: Literal["adamw", "lars", "larc", "lamb", "sgd"] = "adamw"
    momentum: Share = 0.9  # momentum of lars, larc and sgd
    # Of adamw: share that the moving average of squared gradients keeps of its value in a step (MAE: 0.95)
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    batch: PositiveInt = 1024  # images per step over all ranks, whatever their number
    # Images per forward pass of each rank; the gradient is still that of the batch. auto: as many as fit; None: all
    micro_batch: PositiveInt | Literal["auto"] | None = None
    # Each block of the backbone keeps only its input and recomputes the rest in the backward pass
    checkpointing: bool = False
    # Number format in which ranks average gradients; bf16 sends half as many bytes
    reduce: Literal["fp32", "bf16"] = "fp32"
    epochs: PositiveInt = 100  # length of the training, on which all schedules are based
    lr: Schedule = Schedule(value=5e-4, warmup=10, end=1e-6, inclusive=True)  # learning rate
    lr_images: PositiveInt | None = None  # lr.value is for this batch size and is scaled linearly; None: not scaled
    layer_decay: Share | None = None  # ratio of a layer's rate to that of the layer above; None: all alike
    constant_lr: tuple[str, ...] = ()  # parts of a method whose learning rate stays at lr.value (SimSiam's predictor)
    weight_decay: Schedule = Schedule(value=0.04, end=0.4)  # for the parameters that `decay` selects
    # matrices: no vectors such as biases; timm: also no tensors that timm's model excludes; all: every parameter
    decay: Literal["all", "matrices", "timm"] = "matrices"
    # Factor on the learning rate of parameters that `decay` leaves out, such as biases (Barlow Twins: 0.024)
    undecayed_lr_scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    clip: Annotated[float, Field(gt=0)] | None = None  # gradients with a larger norm are scaled down to this norm
    clip_each: bool = False  # clip every tensor by its own norm (DINO), not by the norm of all tensors
    # Largest norm of the patch projection's gradient, which is scaled after optim.clip; None: no limit
    clip_patch: Annotated[float | None, Field(gt=0)] = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Watch:
    """The settings with which a run monitors itself, described in docs/health.md."""

    every: PositiveInt = 50  # steps between measurements (docs/health.md)
    # Number of newest training crops among which the kNN monitor votes; None: a tenth of the images, at most 131072
    bank: PositiveInt | None = None
    k: PositiveInt = 200  # number of nearest neighbours
    temperature: Annotated[float, Field(gt=0)] = 0.07  # temperature of the neighbours' votes


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Checkpoint:
    steps: PositiveInt | None = None  # steps between checkpoints
    minutes: Annotated[float, Field(gt=0)] = 10.0  # minutes between checkpoints; with `steps`, whichever comes first
    keep: PositiveInt = 3  # number of newest checkpoints that are kept
    # Epochs whose checkpoints are kept as well: a list such as [100, 200], or 50 for every 50th epoch
    milestones: PositiveInt | tuple[PositiveInt, ...] = ()


@dataclass(frozen=True, kw_only=True, config=STRICT | ConfigDict(serialize_by_alias=True))
class Start:
    """The weights that a run takes over before its first step, described in docs/start.md."""

    # A run, an export, a checkpoint, a file of tensors, timm:NAME or hf:NAME (docs/start.md#sources)
    source: Annotated[str, Field(alias="from")]
    # method: also the source's momentum copy, heads, centres and queues; all: also the optimiser's moments and the step
    what: Literal["backbone", "method", "all"] = "backbone"
    # Number of first epochs in which only the heads are trained, and the backbone stays as it is
    freeze: Annotated[float, Field(ge=0)] = 0.0
    # Weight of the loss that keeps patches as similar to each other as at the start (Gram anchoring); 0: none
    anchor: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    # Share of the start's kNN accuracy, or without labels of the crops found, below which the run ends (docs/start.md)
    stop_below: Share | None = None
    keep_best: bool = False  # the run ends with its best checkpoint, also where `stop_below` ends it

    def at(self, source: str) -> "Start":
        """Return these settings with another source."""
        return Start(**config.to_plain(self) | {"from": source})


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Track:
    """The trackers that get a run's history, and the name under which its backbone is registered."""

    # Name under which MLflow's registry gets the backbone of the finished run (docs/running.md#the-backbone-as-a-model)
    register: ModelName | None = None
    also: tuple[Literal["tensorboard", "wandb"], ...] = ()  # trackers that get the metrics as well as MLflow


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Recipe:
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0  # random seed of weights, sample order, crops and drop path
    method: Method
    backbone: TrainedNetwork = TrainedNetwork()
    # What continued pretraining begins with; None: random weights, or those of `backbone.weights` for fine-tuning.
    start: Start | None = None
    views: Annotated[tuple[View, ...], AfterValidator(check_views)]
    # Early phases with smaller views or fewer patches, in the order of their epochs; then views are as stated above.
    curriculum: tuple[Phase, ...] = ()
    data: Data = Data()
    optim: Optim = Optim()
    evaluate: Evaluate = Evaluate()
    monitor: Watch = Watch()
    checkpoint: Checkpoint = Checkpoint()
    track: Track = Track()
    log_steps: PositiveInt = 10  # steps between lines of metrics.jsonl
    out: str = "runs/run"  # folder of the run, local or an s3://, gs:// or az:// URL
    # Number of Ray Train workers. 4..16: at any time, as many of 4 to 16 as the cluster can hold; 0: no Ray
    workers: Annotated[int | str, AfterValidator(_workers)] = 1
    # Number format of matrix products. auto: bf16 on an accelerator that has it, fp16 on one without, fp32 on a
    # CPU (docs/running.md#precision)
    precision: Format = "auto"
    # Whether torch.compile compiles backbones and heads of prototypes. auto: on accelerators with a compiler
    # (docs/running.md#speed)
    compile: Literal["auto"] | bool = "auto"
    deterministic: bool = False  # use only GPU operations with bit-identical results, of which some are slower
    gpus: bool | None = None  # true: a GPU for each worker, also if it must wait; None: if there are enough
    # fsdp: each rank keeps some rows of every weight, gradient and moment, and gathers weights when they are needed
    # (docs/running.md#memory)
    parallel: Literal["ddp", "fsdp"] = "ddp"
    max_steps: PositiveInt | None = None  # the run stops after this many steps; schedules do not change
    # First and last step to profile, such as 10..12; the run folder gets a trace and a table of operations
    profile: Annotated[str | None, AfterValidator(_steps)] = None
    # Your own Python files or modules, whose methods, operations and data sets a recipe can name (docs/plugins.md)
    plugins: tuple[Plugin, ...] = ()

    @property
    def planes(self) -> int:
        """Return the number of channels of the images."""
        return planes(self.data.channels)

    @property
    def teacher(self) -> Network | None:
        """Return the network of the method's frozen teacher; None for a method that has none."""
        teacher = self.method.args.get("teacher")
        return teacher if isinstance(teacher, Network) else None

    @property
    def phases(self) -> tuple[PhaseViews, ...]:
        """Return the views of every phase. Raises UserError when a phase has no epoch or does not fit the views."""
        return phases(self.views, self.curriculum, self.optim.epochs)

    @property
    def weight_sources(self) -> dict[str, str]:
        """Return the sources from which the run reads weights before its first step, by key."""
        named = {
            "backbone.weights": self.backbone.weights,
            "start.from": self.start.source if self.start else None,
            TEACHER: self.teacher.weights if self.teacher else None,
        }
        return {key: source for key, source in named.items() if source}

    @property
    def ranks(self) -> tuple[int, int]:
        """Return the fewest and the most processes that may train. Without Ray there is one, this process."""
        least, most = span(self.workers)
        return max(least, 1), max(most, 1)

    @property
    def is_elsewhere(self) -> bool:
        """Return whether a cluster starts the workers, on machines that may have what this one lacks."""
        return bool(self.workers and os.environ.get("RAY_ADDRESS"))


TEACHER = "method.teacher.weights"  # key that errors about the teacher's weights name

# Keys that may change when a run is continued: where and how long it runs and how it is judged, not what it learns.
OPERATION: tuple[str, ...] = ("out", "workers", "gpus", "max_steps", "log_steps", "checkpoint", "evaluate", "monitor")
OPERATION += ("optim.micro_batch", "optim.checkpointing", "data.workers", "data.bad_limit", "data.test")
OPERATION += ("profile", "precision", "compile", "deterministic", "optim.reduce", "parallel", "track")
OPERATION += ("data.cache", "data.cache_size", "data.patience", "data.crops", "start.stop_below", "start.keep_best")


def flat(recipe: Recipe) -> dict[str, Any]:
    """Return the dotted keys of a resolved recipe and their plain values."""
    return config.flatten(config.to_plain(recipe))


def identity(recipe: Recipe | Mapping[str, Any]) -> dict[str, Any]:
    """Return the dotted keys of a recipe, or of its plain tree, whose values two runs of one experiment must share, and
    these values."""
    keys = config.flatten(recipe) if isinstance(recipe, Mapping) else flat(recipe)
    free = (*OPERATION, *_changeable_keys(keys.get("method.name")))
    kept = {k: v for k, v in keys.items() if not any(k == f or k.startswith(f + ".") for f in free)}
    # The revision of a Hugging Face data set is left out: its digest tells a change, and the error names the revision.
    return kept | {k: unpinned(v) for k, v in kept.items() if k == "data.train"}


def _changeable_keys(method: str | None) -> list[str]:
    """Return the keys of the method section that may change when a run continues; none for an unknown method."""
    try:
        may_change = config.part_constant("eagleray.methods", method, "may_change") if method else ()
    except UserError:  # the plug-in of the run may not be loaded
        may_change = ()
    return [f"method.{key}" for key in may_change]


def digest(recipe: Recipe) -> str:
    """Return a short hash of the values of the recipe's identity that differ from the defaults: runs with the same hash
    may continue each other, and a key that a later version adds changes no hash."""
    return hashlib.sha256(json.dumps(identity(config.chosen(recipe)), sort_keys=True).encode()).hexdigest()[:16]


def load(name: str, overrides: Sequence[str] = (), plugins: Sequence[str] = (), *, named: bool = False) -> Recipe:
    """Return the resolved recipe of a shipped name, a file or a run, with a default for `out`. `plugins` are added to
    those that the recipe lists. With `named`, plug-ins that the user has not named are refused instead of loaded.
    Raises UserError when the recipe is wrong or missing, and Outage when the run is in a store that does not answer."""
    from eagleray.runs.named_run import named_run

    tree = read(name, overrides, plugins)
    folder = Path(name).parent if name.endswith((".yaml", ".yml")) else None
    if tree.get("plugins") and not named and (run := named_run(name)):
        folder = run.plugins()
    return check(tree, name.rstrip("/").rpartition("/")[2], folder=folder, named=named)


def read(name: str, overrides: Sequence[str] = (), plugins: Sequence[str] = ()) -> dict[str, Any]:
    """Return the keys of a recipe, which are not checked yet, and load no plug-in. The arguments are those of `load`.
    Raises UserError when the recipe cannot be read, and Outage when a store does not answer."""
    from eagleray.config import bundled
    from eagleray.runs.named_run import named_run

    run = named_run(name)
    title, tree = bundled.read_recipe(str(run.file) if run else name)
    if run:
        tree["out"] = run.out  # the run may have been moved
    for item in overrides:
        tree = config.merge(tree, config.override(item))
    if plugins:
        tree["plugins"] = [*(tree.get("plugins") or ()), *plugins]
    return tree | ({"out": f"runs/{title}"} if tree.get("out") in (None, "") else {})


def check(tree: dict[str, Any], source: str, *, folder: Path | None = None, named: bool = False) -> Recipe:
    """Return the recipe of a tree of plain values, after loading the plug-ins that it names; their files are
    relative to `folder`. `named` is as in `load`. Raises UserError, beginning with `source`, if the recipe is wrong."""
    loading.load_installed()
    listed = loading.resolve(tree.get("plugins") or [], folder=folder, named=named)
    method = tree.get("method")
    entry = register.entries("method").get(str(method.get("name") if isinstance(method, Mapping) else method))
    if entry:
        from eagleray.runs.contract import check_method_class  # imports PyTorch, as the plug-in did

        check_method_class(entry)
    recipe: Recipe = _with_channels(config.check(Recipe, tree | {"plugins": listed}, source))
    _check_view_count(recipe)
    if needs_boxes(recipe):
        _check_boxes(recipe)
    parts = [loading.plugin_of(recipe.method.name), loading.plugin_of(recipe.backbone.name, "backbone")]
    parts += [loading.plugin_of(name, "view") for view in recipe.views for name in view.operations]
    extra = {p for p in parts if p} - set(recipe.plugins)  # plug-ins of installed packages
    return replace(recipe, plugins=(*recipe.plugins, *sorted(extra, key=lambda p: p.name)))


def check_lanes(recipe: Recipe) -> None:
    """Raises UserError when the number of lanes does not divide the batch, or a step has fewer images than ranks."""
    from eagleray.data.order import rows  # imported late, as it imports NumPy, which showing a recipe does not need

    batch, lanes = recipe.optim.batch, recipe.data.lanes
    if batch % lanes:
        raise UserError(
            f"optim.batch={batch} data.lanes={lanes}: a global batch of {batch} cannot be divided into {lanes} lanes: "
            "the number of lanes must divide it"
        )
    for ranks in recipe.ranks:
        rows(lanes, batch, ranks=ranks)


def _check_view_count(recipe: Recipe) -> None:
    """Raises UserError when the recipe has more or fewer views than the method works with."""
    least, most = config.part_constant("eagleray.methods", recipe.method.name, "views")
    if not least <= (views := sum(v.count for v in recipe.views)) <= most:
        count = f"{least}" if least == most else f"{least} to {most}"
        raise UserError(f"views: got {views}, but {recipe.method.name} works with {count}")


def needs_boxes(recipe: Recipe) -> bool:
    """Return whether the method reads the boxes of views, which tell where in the image each view lies.
    A method for which boxes are optional reads them if no view moves pixels after its crop."""
    needs = config.part_constant("eagleray.methods", recipe.method.name, "needs_boxes")
    return not any(view.moving for view in recipe.views) if needs is None else bool(needs)


def _check_boxes(recipe: Recipe) -> None:
    """Raises UserError when a view moves pixels after its crop, so that its place in the image is not known."""
    for i, view in enumerate(recipe.views):
        for key, value in view.moving.items():
            raise UserError(
                f"views.{i}.{key}={list(value) if isinstance(value, tuple) else value}: may move pixels after the "
                f"crop, and {recipe.method.name} needs to know where in the image they are; leave it out"
            )


def _with_channels(recipe: Recipe) -> Recipe:
    """Return the recipe with a backbone for the channels of its images. Raises UserError when keys contradict these."""
    channels, options = recipe.data.channels, recipe.backbone.options
    given = options.get("in_chans", recipe.planes)
    if given != recipe.planes:
        raise UserError(
            f"backbone.options.in_chans={given}: expected {recipe.planes}, as data.channels has "
            f"{len(channels) or 'no'} entries; `eagleray data stats --channels` prints them"
        )
    if channels and recipe.teacher:
        raise UserError(
            f"data.channels: {recipe.method.name} has a teacher that sees red, green and blue; leave them out"
        )
    check_operations(recipe.views, channels)
    if len(channels) in (0, RGB):
        return recipe
    return replace(recipe, backbone=replace(recipe.backbone, options=options | {"in_chans": len(channels)}))
