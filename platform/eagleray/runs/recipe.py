"""Define a recipe, the settings of a pretraining run. Units are in the comments; a resolved recipe holds every
field."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from eagleray import config
from eagleray.base.errors import UserError
from eagleray.config import STRICT, Part, bundled, part_of, register
from eagleray.config import plugins as loading
from eagleray.config.channels import RGB, Channels, check_operations, planes
from eagleray.config.curriculum import Phase, PhaseViews, phases
from eagleray.config.plugins import Plugin
from eagleray.config.schedule import Schedule
from eagleray.config.source import Source, Sources
from eagleray.config.types import Bytes, Format, ModelName, Share
from eagleray.config.view import MOVING, View, check_views
from eagleray.models.network import Network, is_public
from eagleray.protocols.settings import Evaluate

if TYPE_CHECKING:
    Method = Part
else:
    Method = part_of("eagleray.methods")


def span(workers: int | str) -> tuple[int, int]:
    """Return the fewest and the most workers that a run may have, from `4..16` or from one number. Raises
    ValueError."""
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
    """Return the first and the last of the steps in a text such as `10..12`. Raises ValueError."""
    match = re.fullmatch(r"(\d+)\.\.(\d+)", text)
    if not match or not 0 < int(match[1]) <= int(match[2]):
        raise ValueError("expected the first and the last step, such as 10..12")
    return int(match[1]), int(match[2])


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Data:
    train: Sources | None = (
        None  # folder, glob, brace pattern of shards, local or by URL; or a list of them and of Sources
    )
    test: Sources | None = (
        None  # labelled shards; without it a tenth of labelled training data is held out of the kNN bank
    )
    lanes: PositiveInt = 64  # equal slices of a global batch, each of which is read from its own part of the data
    # Loader processes per rank; 0: in the training process; auto: two fewer than the CPUs of the rank
    workers: NonNegativeInt | Literal["auto"] = 4
    # scaled: a large JPEG is decoded at a half, a quarter or an eighth of its size where every crop is reduced further
    decode: Literal["full", "scaled"] = "full"
    # The channels of the images, of which `eagleray data stats --channels` prints these lines; none: red, green, blue
    channels: Channels = ()
    bad_limit: Share = 0.01  # more broken samples than this share of the data stop the run
    cache: str | None = None  # folder on each node's own disk that keeps what was fetched
    cache_size: Bytes = 100 * 2**30  # bytes, or such as 200GiB
    patience: Annotated[float, Field(gt=0)] = (
        10.0  # minutes that the store may stay away before the run saves and stops
    )

    def sources(self) -> tuple[Source, ...]:
        """Return the sources of the training data. Raises UserError when the recipe names none."""
        if self.train is None:
            raise UserError("data.train: missing; expected a folder, glob, brace pattern or s3:// URL of shards")
        return self.train


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Optim:
    name: Literal["adamw", "lars", "larc", "lamb", "sgd"] = "adamw"
    momentum: Share = 0.9  # read by lars, larc and sgd
    # Of adamw: the share of its value that the average of squared gradients keeps in a step.
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    batch: PositiveInt = 1024  # images per step over all ranks; no rank count changes it
    # Images in the backbone at once on each rank, with the gradient of all; auto: as many as fit; None: all.
    micro_batch: PositiveInt | Literal["auto"] | None = None
    # Each block of the backbone keeps only its input and computes the rest again in the backward pass.
    checkpointing: bool = False
    # The format in which ranks average gradients; bf16 sends half as many bytes.
    reduce: Literal["fp32", "bf16"] = "fp32"
    epochs: PositiveInt = 100
    lr: Schedule = Schedule(value=5e-4, warmup=10, end=1e-6, inclusive=True)
    lr_images: PositiveInt | None = None  # lr.value is for a batch of this size and scales linearly; None: as it is
    layer_decay: Share | None = None  # the rate's factor from each layer to the one below; None: all alike
    constant_lr: tuple[str, ...] = ()  # parts of the method whose rate stays at lr.value (SimSiam's predictor)
    weight_decay: Schedule = Schedule(value=0.04, end=0.4)
    # matrices: biases and other vectors are not decayed; timm: nor is what timm's model names, such as position tables
    decay: Literal["all", "matrices", "timm"] = "matrices"
    # Factor on the rate of the parameters that `decay` leaves out, such as biases and norms
    undecayed_lr_scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    clip: Annotated[float, Field(gt=0)] | None = None  # gradient norm
    clip_each: bool = False  # the norm of every tensor on its own (DINO), not of all together
    # Norm of the patch projection's gradient, after optim.clip; None: as it is
    clip_patch: Annotated[float | None, Field(gt=0)] = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Watch:
    """The settings with which a run monitors itself, described in docs/health.md."""

    every: PositiveInt = 50  # steps between measurements
    bank: PositiveInt | None = (
        None  # newest training crops that the kNN monitor votes with; None: a tenth of the images, 131072 at most
    )
    k: PositiveInt = 200
    temperature: Annotated[float, Field(gt=0)] = 0.07


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Checkpoint:
    steps: PositiveInt | None = None  # steps between checkpoints
    minutes: Annotated[float, Field(gt=0)] = 10.0  # minutes between checkpoints, whichever comes first
    keep: PositiveInt = 3


@dataclass(frozen=True, kw_only=True, config=STRICT | ConfigDict(serialize_by_alias=True))
class Start:
    """The weights that a run takes over before its first step, described in docs/start.md."""

    # A run, an export, a checkpoint, a file of tensors, timm:NAME or hf:NAME. The key is `from`, a word of Python.
    source: Annotated[str, Field(alias="from")]
    # method: also the momentum copy, heads, centres and queues that the source has; all: also moments and the step
    what: Literal["backbone", "method", "all"] = "backbone"
    # Epochs in which only heads are trained, and the backbone stays as it is.
    freeze: Annotated[float, Field(ge=0)] = 0.0
    # Weight of the loss that keeps patches as similar to each other as at the start (Gram anchoring); 0: none.
    anchor: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    # Share of the start's kNN accuracy, or without labels the likeness to its features, below which the run ends.
    stop_below: Share | None = None

    def at(self, source: str) -> "Start":
        """Return the same with another source."""
        return Start(**config.to_plain(self) | {"from": source})


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Track:
    """The places, beside the run folder, of a run's history and its backbone."""

    register: ModelName | None = None  # MLflow's registry keeps the backbone under this name at the end
    also: tuple[Literal["tensorboard", "wandb"], ...] = ()  # get the numbers, too


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Recipe:
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    method: Method
    backbone: Network = Network()
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
    out: str = "runs/run"  # folder of the run, or s3:// URL; `load` sets runs/<recipe name> where it is not given
    # Ray Train workers; 4..16: as many of them as the cluster has room for, now and later; 0: in this process, no Ray.
    workers: Annotated[int | str, AfterValidator(_workers)] = 1
    # auto: bf16 on an accelerator that has it, fp16 on one that has not, fp32 on a CPU
    precision: Format = "auto"
    # The backbones run through torch.compile. auto: on accelerators that have a compiler
    compile: Literal["auto"] | bool = "auto"
    deterministic: bool = False  # bit-equal continuation on a GPU
    gpus: bool | None = None  # a GPU for each worker, whether they are there yet or not; None: where there are enough
    # fsdp: each rank keeps some rows of every weight, gradient and moment, and gathers weights when they are needed
    parallel: Literal["ddp", "fsdp"] = "ddp"
    max_steps: PositiveInt | None = None  # stop early, without changing any schedule
    # First and last step to profile, such as 10..12: a trace and a table of operations in the run folder.
    profile: Annotated[str | None, AfterValidator(_steps)] = None
    # The user's own files and modules, with digests of their source; a recipe lists their names alone.
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
        """Return what is seen in every phase of the training. Raises UserError when a phase has no epoch or does not
        fit the views."""
        return phases(self.views, self.curriculum, self.optim.epochs)

    @property
    def weight_files(self) -> dict[str, str]:
        """Return the places that the run reads weights from before its first step, by key; names of timm and the Hub
        are none."""
        named = {
            "backbone.weights": self.backbone.weights,
            "start.from": self.start.source if self.start else None,
            TEACHER: self.teacher.weights if self.teacher else None,
        }
        return {key: source for key, source in named.items() if source and not is_public(source)}

    @property
    def ranks(self) -> tuple[int, int]:
        """Return the fewest and the most processes that may train. Without Ray it is this one."""
        least, most = span(self.workers)
        return max(least, 1), max(most, 1)


TEACHER = "method.teacher.weights"  # errors name this key

# What may differ when a run is continued: where and how long it runs and how it is judged, not what it learns.
OPERATION: tuple[str, ...] = ("out", "workers", "gpus", "max_steps", "log_steps", "checkpoint", "evaluate", "monitor")
OPERATION += ("track", "start.stop_below")
OPERATION += ("optim.micro_batch", "optim.checkpointing", "data.workers", "data.bad_limit", "data.test")
OPERATION += ("profile", "precision", "compile", "deterministic", "optim.reduce", "parallel")
OPERATION += ("data.cache", "data.cache_size", "data.patience")


def flat(recipe: Recipe) -> dict[str, Any]:
    """Return the dotted keys of a resolved recipe and their plain values."""
    return config.flatten(config.to_plain(recipe))


def identity(recipe: Recipe | Mapping[str, Any]) -> dict[str, Any]:
    """Return the dotted keys and values, of a recipe or of its plain tree, that make two runs the same experiment."""
    keys = config.flatten(recipe) if isinstance(recipe, Mapping) else flat(recipe)
    free = (*OPERATION, *_changeable_keys(keys.get("method.name")))
    return {k: v for k, v in keys.items() if not any(k == f or k.startswith(f + ".") for f in free)}


def _changeable_keys(method: str | None) -> list[str]:
    """Return the keys of the method section that may change when a run continues. None when the method is not known
    here."""
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
    """Return the resolved recipe of a shipped name or a file, with a default for `out`. `plugins` are added to those
    that the recipe lists. `named`: none is loaded that is not loaded yet, as a run's own may be a stranger's. Raises
    UserError."""
    tree = read(name, overrides, plugins)
    folder = Path(name).parent if name.endswith((".yaml", ".yml")) else None
    return check(tree, name.rpartition("/")[2], folder=folder, named=named)


def read(name: str, overrides: Sequence[str] = (), plugins: Sequence[str] = ()) -> dict[str, Any]:
    """Return the keys of a recipe, which are not checked yet, and load no plug-in. The arguments are those of `load`.
    Raises UserError."""
    title, tree = bundled.read_recipe(name)
    for item in overrides:
        tree = config.merge(tree, config.override(item))
    if plugins:
        tree["plugins"] = [*(tree.get("plugins") or ()), *plugins]
    return tree | ({"out": f"runs/{title}"} if tree.get("out") in (None, "") else {})


def check(tree: dict[str, Any], source: str, *, folder: Path | None = None, named: bool = False) -> Recipe:
    """Return the recipe of a tree of plain values, after loading the plug-ins that it names; their files are
    relative to `folder`. `named` is as in `load`. Raises UserError, which begins with `source`."""
    loading.load_installed()
    listed = loading.resolve(tree.get("plugins") or [], folder=folder, named=named)
    method = tree.get("method")
    entry = register.entries("method").get(str(method.get("name") if isinstance(method, Mapping) else method))
    if entry:
        from eagleray.runs.contract import check_method_class  # it imports PyTorch, as the plug-in has done

        check_method_class(entry)
    recipe: Recipe = _with_channels(config.check(Recipe, tree | {"plugins": listed}, source))
    if needs_boxes(recipe):
        _check_boxes(recipe)
    parts = [loading.plugin_of(recipe.method.name), loading.plugin_of(recipe.backbone.name, "backbone")]
    parts += [loading.plugin_of(name, "view") for view in recipe.views for name in view.operations]
    extra = {p for p in parts if p} - set(recipe.plugins)  # plug-ins of installed packages
    return replace(recipe, plugins=(*recipe.plugins, *sorted(extra, key=lambda p: p.name)))


def needs_boxes(recipe: Recipe) -> bool:
    """Return whether the method reads where in the image each view lies."""
    return bool(config.part_constant("eagleray.methods", recipe.method.name, "needs_boxes"))


def _check_boxes(recipe: Recipe) -> None:
    """Raises UserError when a view moves pixels after its crop."""
    for i, view in enumerate(recipe.views):
        for key in MOVING:
            if value := getattr(view, key):
                raise UserError(
                    f"views.{i}.{key}={list(value) if isinstance(value, tuple) else value}: may move pixels after the "
                    f"crop, and {recipe.method.name} needs to know where in the image they are; leave it out"
                )


def _with_channels(recipe: Recipe) -> Recipe:
    """Return the recipe with a backbone for the channels of its images. Raises UserError when other keys do not fit
    them."""
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
