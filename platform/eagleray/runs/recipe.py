"""What a pretraining run is, as data. Units are in the comments; every field is in the resolved recipe."""

import hashlib
import importlib.util
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass

from eagleray import config
from eagleray.config import STRICT, Part, Size, part_of
from eagleray.config.source import Sources
from eagleray.base.errors import UserError
from eagleray.config.schedule import Schedule
from eagleray.config.view import View

if TYPE_CHECKING:
    Method = Part
else:
    Method = part_of("eagleray.methods")

Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Kind = Literal["recipe", "sweep"]
FOLDERS: dict[Kind, str] = {"recipe": "pipelines", "sweep": "tune"}


def span(workers: int | str) -> tuple[int, int]:
    """The fewest and the most workers that a run goes on with: `4..16`, or a number that is both. Raises ValueError."""
    match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", str(workers))
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (-1, -1)
    if not (0 < least <= most or least == most == 0):
        raise ValueError("expected a number of workers, or the fewest and the most, such as 4..16")
    return least, most


def _workers(value: int | str) -> int | str:
    least, most = span(value)
    return most if least == most else f"{least}..{most}"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Network:
    """The backbone: a timm name and what is changed about it."""

    name: str = "vit_small_patch16_224"
    # What it starts from: a run, checkpoint or file of tensors, or timm:NAME for timm's pretrained ones; None: nothing.
    weights: str | None = None
    drop_path: Share = 0.0  # of the student; momentum copies never drop
    init: Literal["timm", "moco"] = "timm"
    # How a ViT places its patches at any crop size: a trained table resampled as in timm or DINO, a fixed one, none.
    position: Literal["timm", "sincos", "dino", "none"] = "timm"
    # A ViT's vector. mean: of its patches, with neither class token nor final norm; norm_mean: of its patches after the
    # final norm, without class token.
    pool: Literal["timm", "mean", "norm_mean"] = "timm"
    norm: Literal["timm", "batch"] = "timm"  # batch: in front of a ViT's MLPs, over images and tokens (ViT-BN)
    stem: Literal["timm", "conv"] = "timm"  # conv: four 3x3 convolutions instead of the projection of 16-pixel patches
    freeze_patch: bool = False  # the random patch projection is not trained (MoCo v3)
    options: dict[str, Any] = field(default_factory=dict)  # handed to timm.create_model


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Data:
    train: Sources | None = (
        None  # folder, glob, brace pattern of shards, file or s3://; or a list of them and of Sources
    )
    test: Sources | None = (
        None  # labelled shards; without it a tenth of labelled training data is held out of the kNN bank
    )
    lanes: Positive = 64  # a global batch is dealt by so many; the most readers (workers x data.workers) there can be
    workers: Count = 4  # loader processes per rank; 0: in the training process
    bad_limit: Share = 0.01  # more broken samples than this share of the data stop the run
    cache: str | None = None  # folder on each node's own disk that keeps what was fetched
    cache_size: Size = 100 * 2**30  # bytes, or such as 200GiB
    patience: Annotated[float, Field(gt=0)] = (
        10.0  # minutes that the store may stay away before the run saves and stops
    )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Optim:
    name: Literal["adamw", "lars", "lamb", "sgd"] = "adamw"
    momentum: Share = 0.9  # of lars and sgd
    batch: Positive = 1024  # images per step over all ranks; no rank count changes it
    micro_batch: Positive | None = (
        None  # images in the backbone at once on each rank, with the gradient of all; None: all
    )
    epochs: Positive = 100
    lr: Schedule = Schedule(value=5e-4, warmup=10, end=1e-6, inclusive=True)
    lr_images: Positive | None = None  # lr.value is meant for a batch of this size and scales linearly; None: as it is
    layer_decay: Share | None = None  # of the rate, from each layer of the backbone to the one below; None: all alike
    constant_lr: tuple[str, ...] = ()  # parts of the method whose rate stays at lr.value (SimSiam's predictor)
    weight_decay: Schedule = Schedule(value=0.04, end=0.4)
    # matrices: biases and other vectors are not decayed; timm: nor is what timm's model names, such as position tables
    decay: Literal["all", "matrices", "timm"] = "matrices"
    clip: Annotated[float, Field(gt=0)] | None = None  # gradient norm
    clip_each: bool = False  # the norm of every tensor on its own (DINO), not of all together


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Evaluate:
    every: Count = 0  # epochs between kNN evaluations during training; 0: at the end only
    size: Positive = 224  # pixels, centre crop
    resize: Positive = 256  # pixels of the short side before the crop
    k: Positive = 20
    temperature: Annotated[float, Field(gt=0)] = 0.07
    limit: Positive | None = None  # training images in the kNN bank and the probe; None: all
    probe_epochs: Count = 100  # of the linear probe; 0: no probe

    def __post_init__(self) -> None:
        if self.resize < self.size:
            raise ValueError(f"resize={self.resize} leaves no room for a crop of size={self.size}")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Watch:
    """How the run watches itself: see docs/health.md."""

    every: Positive = 50  # steps between looks
    bank: Positive | None = (
        None  # newest training crops that the kNN monitor votes with; None: a tenth of the images, 131072 at most
    )
    k: Positive = 200
    temperature: Annotated[float, Field(gt=0)] = 0.07


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Checkpoint:
    steps: Positive | None = None  # between checkpoints
    minutes: Annotated[float, Field(gt=0)] = 10.0  # between checkpoints, whichever comes first
    keep: Positive = 3


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Recipe:
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    method: Method
    backbone: Network = Network()
    views: tuple[View, ...]
    data: Data = Data()
    optim: Optim = Optim()
    evaluate: Evaluate = Evaluate()
    monitor: Watch = Watch()
    checkpoint: Checkpoint = Checkpoint()
    log_steps: Positive = 10  # between lines of metrics.jsonl
    out: str | None = None  # folder of the run, or s3:// URL; None: runs/<recipe name>
    # Ray Train workers; 4..16: as many of them as the cluster has room for, now and later; 0: in this process, no Ray.
    workers: Annotated[int | str, AfterValidator(_workers)] = 1
    gpus: bool | None = None  # a GPU for each worker, whether they are there yet or not; None: where there are enough
    max_steps: Positive | None = None  # stop early, without changing any schedule


# What may differ when a run is continued: where and how long it runs and how it is judged, not what it learns.
OPERATION: tuple[str, ...] = ("out", "workers", "gpus", "max_steps", "log_steps", "checkpoint", "evaluate", "monitor")
OPERATION += ("optim.micro_batch", "data.workers", "data.bad_limit", "data.test")
OPERATION += ("data.cache", "data.cache_size", "data.patience")
OPERATION += ("method.region_from",)  # regions may join a run of EsViT that began without them


def identity(recipe: Recipe | Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys and values, of a recipe or of its plain tree, that make two runs the same experiment."""
    keys = config.flat(recipe if isinstance(recipe, Mapping) else config.plain(recipe))
    return {k: v for k, v in keys.items() if not any(k == o or k.startswith(o + ".") for o in OPERATION)}


def digest(recipe: Recipe) -> str:
    """A short name of the experiment, equal for runs that may continue each other."""
    return hashlib.sha256(json.dumps(identity(recipe), sort_keys=True).encode()).hexdigest()[:16]


def bundled(folder: str) -> Path:
    """The repository's own `pipelines/`, from a checkout or from inside the installed wheel."""
    spec = importlib.util.find_spec("eagleray")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    inside = package / "_bundled" / folder
    return inside if inside.exists() else package.parents[1] / folder


def names(kind: Kind = "recipe") -> list[str]:
    return sorted(p.stem for p in bundled(FOLDERS[kind]).glob("*.yaml"))


def find(name: str, kind: Kind = "recipe") -> Path:
    """The file of a recipe, or of a sweep, given by path or by bundled name. Raises UserError."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise UserError(f"{name}: no such {kind} file")
        return path
    own = bundled(FOLDERS[kind]) / f"{name}.yaml"
    if not own.is_file():
        near = config.nearest(name, names(kind))
        raise UserError(f"{name}: no {kind} of this name{near}; see `eagleray list {kind}s`")
    return own


def header(path: Path) -> list[str]:
    """The lines of the comment that a file begins with."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
    return [line.removeprefix("#").strip() for line in lines]


def load(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """The resolved recipe; `out` is filled in. Raises UserError."""
    path = find(name)
    tree = config.read(path, overrides)
    tree["out"] = tree.get("out") or f"runs/{path.stem}"
    return config.check(Recipe, tree, path.name)
