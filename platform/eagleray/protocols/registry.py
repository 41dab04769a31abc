"""Evaluations by name: what each is run on, and with which settings."""

import importlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_type_hints

import numpy as np
import torch
import yaml
from numpy.typing import NDArray
from pydantic import PositiveInt, PydanticUserError, TypeAdapter, ValidationError, create_model

from eagleray import config
from eagleray.base import dist
from eagleray.base.errors import UserError
from eagleray.data.index import Index
from eagleray.models.backbone import Backbone
from eagleray.protocols.features import Labelled, extract, labelled, some
from eagleray.protocols.knn import knn
from eagleray.protocols.linear import VARIANTS, probe
from eagleray.protocols.outcome import Outcome
from eagleray.protocols.settings import Evaluate
from eagleray.runs.recipe import Recipe

LABELLED = ("knn", "linear")  # those that a run computes at its end; they need labels
HELD = 10  # one labelled sample in so many is held out where there is no test set


@dataclass(frozen=True)
class Protocol:
    """A function that gives an Outcome, and what it needs.

    With `labels` it takes features to learn from and to be tested on, with `suite` a function that gives the features
    of shards; all others take the backbone first, then what else they need: an index of images, or a folder. Its
    keyword-only arguments are settings. `out`, a folder for pictures, and `note`, which is told how it goes, are handed
    to those that have them."""

    about: str
    where: str  # module and function
    needs: tuple[str, ...] = ()
    features: str = "pooled"  # a kind of them, where labels are needed
    preset: Mapping[str, Any] = field(default_factory=dict)

    @property
    def run(self) -> Callable[..., Outcome]:
        module, _, name = self.where.partition(":")
        return getattr(importlib.import_module(f"eagleray.protocols.{module}"), name)  # type: ignore[no-any-return]

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        return dict(inspect.signature(self.run).parameters)

    @property
    def settings(self) -> list[str]:
        """The names of its settings."""
        hints = get_type_hints(self.run, include_extras=True)
        named = [p.name for p in self.parameters.values() if p.kind is p.KEYWORD_ONLY and p.name not in ("out", "note")]
        own = [name for name in named if is_text(hints[name])]
        return own + [name for name in FROZEN if {"labels", "suite"} & set(self.needs) and name not in own]

    def __str__(self) -> str:
        parameters = self.parameters
        fallen = {"size": "of the recipe", "resize": "of the recipe", "features": self.features}
        own = {n: parameters[n].default for n in self.settings if n in parameters} | dict(self.preset)
        fallen |= {n: v for n, v in own.items() if v is not inspect.Parameter.empty}
        needs = "; ".join(OPTIONS[n] for n in self.needs if n in OPTIONS) or "no data"
        return f"{self.about}; {needs}; " + ", ".join(f"--{n} {fallen[n]}" for n in self.settings)

    def checked(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Settings with the types that the function's signature asks for. Raises UserError."""
        hints = get_type_hints(self.run, include_extras=True) | FROZEN
        model = create_model("settings", __config__=config.STRICT, **{k: (hints[k], ...) for k in given})  # type: ignore[call-overload]
        try:
            full = model.model_validate({k: listed(v, hints[k]) for k, v in given.items()})
        except ValidationError as e:
            raise UserError("; ".join(f"--{line}" for line in config.explain(e, model))) from None
        return {k: getattr(full, k) for k in given}


# Settings of features that are extracted once.
FROZEN: dict[str, Any] = {"size": PositiveInt, "resize": PositiveInt, "features": str}
# What the needs are called on the command line.
OPTIONS = {
    "labels": "--train URL of labelled shards",
    "images": "--train or --test URL",
    "coco": "--coco DIR",
    "masks": "--masks DIR",
    "davis": "--davis DIR",
    "suite": "--suite ROOT",
}
PROTOCOLS = {
    "knn": Protocol("the nearest training images vote (DINO, InstDisc)", "knn:neighbours", ("labels",)),
    "linear": Protocol("a linear classifier, its rate picked on held-out images", "linear:linear", ("labels",)),
    **{
        f"linear@{name}": Protocol(
            f"the same with the settings of {title}", "linear:linear", ("labels",), features, VARIANTS[name]
        )
        for name, title, features in (
            ("mocov3", "MoCo v3", "pooled"),
            ("dino", "DINO, on the last 4 blocks", "last4"),
            ("esvit", "EsViT, on the last 4 blocks", "last4"),
            ("selfpatch", "SelfPatch", "pooled"),
        )
    },
    "correspondence": Protocol(
        "patches found again in the mirrored image (EsViT)", "correspondence:correspondence", ("images", "patches")
    ),
    "logistic": Protocol("L-BFGS, its lambda searched on held-out images (EsViT)", "logistic:logistic", ("labels",)),
    "suite": Protocol("the same on the sets of EsViT's suite of 18", "suite:suite", ("suite",)),
    "attention": Protocol("maps of the last block's attention, by head", "visual.attention:attention", ("images",)),
    "components": Protocol(
        "principal components of patches as colours", "visual.explore:components", ("images", "patches")
    ),
    "neighbours": Protocol("sheets of the nearest images", "visual.explore:neighbours", ("images",)),
    "pairs": Protocol("the likest patches of two views and two images", "visual.explore:pairs", ("images", "patches")),
    "detection": Protocol("Mask R-CNN or Cascade Mask R-CNN, fine-tuned", "detection.detection:detection", ("coco",)),
    "segmentation": Protocol(
        "Semantic FPN or UPerNet, fine-tuned", "segmentation.segmentation:segmentation", ("masks",)
    ),
    "davis": Protocol("objects followed through videos", "video.davis:davis", ("davis", "patches")),
    "throughput": Protocol("images/s, parameters, multiply-adds and memory", "throughput:throughput"),
}


def is_text(hint: Any) -> bool:
    """Whether a value can be given on the command line: no function and no tensor."""
    try:
        TypeAdapter(hint).json_schema()
    except PydanticUserError:
        return False
    return True


def listed(value: Any, hint: Any) -> Any:
    """A value of the command line, `0.1,1` for a list."""
    if hint is str or not isinstance(value, str):
        return value
    try:
        found = yaml.safe_load(value)
        if "tuple" in str(hint) and not isinstance(found, list):
            found = yaml.safe_load(f"[{value}]")
    except yaml.YAMLError:
        return value
    return found


def known(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """The names that there are, and a line about each of the others."""
    every = list(PROTOCOLS)
    strange = [n for n in dict.fromkeys(names) if n not in PROTOCOLS]
    return [n for n in dict.fromkeys(names) if n in PROTOCOLS], [
        f"--protocol {n}: unknown{config.nearest(n, every)}; see `eagleray list protocols`" for n in strange
    ]


@dataclass(frozen=True)
class Sets:
    """Labelled images to learn from and to be tested on."""

    bank: Index
    bank_samples: NDArray[np.int64]
    test: Index
    test_samples: NDArray[np.int64]

    @classmethod
    def of(cls, train: Index, test: Index | None, limit: int | None) -> "Sets | None":
        """None when there are no labels to evaluate with. Pretraining saw no label, so a part of its own images may
        serve as the test set."""
        if not train.labelled:
            return None
        every = labelled(train)
        if test is not None:
            return cls(train, some(every, limit), test, labelled(test))
        held = some(every, max(len(every) // HELD, 1))
        return cls(train, some(np.setdiff1d(every, held), limit), train, held)

    def check(self) -> None:
        """Raises UserError where what is learnt cannot be tested."""
        train, test = np.unique(self.bank.label[self.bank_samples]), np.unique(self.test.label[self.test_samples])
        if not len(test):
            raise UserError("--test: no labels there, and this protocol needs them")
        if len(train) < 2:
            raise UserError(f"--train: {len(train)} class(es) there, and a classifier needs two or more")
        if strange := np.setdiff1d(test, train).tolist():
            some_ = ", ".join(map(str, strange[:5])) + (", ..." if strange[5:] else "")
            raise UserError(f"--test: {len(strange)} of its {len(test)} classes are not in --train: {some_}")
        both = {b.url for b in self.bank.shards} & {b.url for b in self.test.shards}
        if both and self.test is not self.bank:
            raise UserError(f"--test: {min(both)} is also in --train; the images to test on must be others")

    def how(self, recipe: Recipe, protocol: str) -> str:
        """The settings that a number was made with, for the reader of the number."""
        e = recipe.evaluate
        settings = f"k={e.k}, T={e.temperature:g}" if protocol == "knn" else f"{e.probe_epochs} epochs"
        return f" ({settings}; {len(self.bank_samples)} training, {len(self.test_samples)} test images)"


def evaluate(
    backbone: Backbone, sets: Sets | None, settings: Evaluate, *, protocols: Sequence[str] = LABELLED
) -> dict[str, float]:
    """What a run measures by itself; the same on every rank. Features are extracted once, by all ranks."""
    if sets is None or not protocols:
        return {}
    size, resize = settings.size, settings.resize
    train = extract(backbone, sets.bank, sets.bank_samples, size=size, resize=resize)
    test = extract(backbone, sets.test, sets.test_samples, size=size, resize=resize)
    out: dict[str, float] = {}
    if dist.rank() == 0 and len(train.x) and len(test.x):
        train, test = counted(train, test, next(backbone.parameters()).device)
        if "knn" in protocols:
            out |= knn(train, test, k=settings.k, temperature=settings.temperature)
        if "linear" in protocols and settings.probe_epochs:
            out |= probe(train, test, epochs=settings.probe_epochs)
    return json.loads(dist.objects(json.dumps(out))[0])  # type: ignore[no-any-return]


def counted(train: Labelled, test: Labelled, device: torch.device) -> tuple[Labelled, Labelled]:
    """The same on a device, with classes numbered from 0: labels may be any numbers."""
    y = torch.cat([train.y, test.y]).unique(return_inverse=True)[1].to(device)
    return Labelled(train.x.to(device), y[: len(train.y)]), Labelled(test.x.to(device), y[len(train.y) :])
