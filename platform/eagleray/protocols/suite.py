"""The suite of 18 sets for frozen features: EsViT, Li et al. 2021, arXiv:2106.09785, tables 10 and 11."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from pydantic import NonNegativeInt

from eagleray.base.errors import UserError
from eagleray.datasets import multilabel
from eagleray.datasets.catalogue import DATASETS
from eagleray.datasets.sources import files
from eagleray.protocols.features import Labelled
from eagleray.protocols.logistic import probe
from eagleray.protocols.outcome import Outcome
from eagleray.storage import store


class Row(NamedTuple):
    """How a set is scored, and what table 11 has for Swin-T, in percent."""

    metric: str  # of metrics.py
    supervised: float
    esvit: float


SUITE = {
    "food-101": Row("top1", 77.4, 80.0),
    "cifar-10": Row("top1", 94.0, 95.3),
    "cifar-100": Row("top1", 77.5, 82.2),
    "sun397": Row("top1", 64.3, 67.6),
    "cars": Row("top1", 55.3, 66.4),
    "aircraft": Row("mean_per_class", 51.5, 61.1),
    "voc2007": Row("map11", 84.2, 85.5),
    "dtd": Row("top1", 73.1, 78.1),
    "pets": Row("mean_per_class", 93.3, 92.8),
    "caltech-101": Row("mean_per_class", 90.8, 93.0),
    "flowers-102": Row("mean_per_class", 91.5, 97.4),
    "mnist": Row("top1", 98.3, 98.3),
    "fer2013": Row("top1", 55.1, 59.3),
    "stl10": Row("top1", 97.9, 98.9),
    "gtsrb": Row("top1", 72.9, 84.3),
    "pcam": Row("top1", 84.0, 84.6),
    "ucf101": Row("top1", 79.0, 81.1),
    "hateful-memes": Row("roc_auc", 51.2, 52.0),
}
SUPERVISED = {name: row.supervised for name, row in SUITE.items()}


def suite(
    features: Callable[[str], Labelled],
    root: str,
    reference: Mapping[str, float] = SUPERVISED,
    *,
    seed: NonNegativeInt = 0,
    note: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """The logistic probe on every set that is there as shards ROOT/NAME/SPLIT, whose `features` are asked for by URL.

    Numbers are each set's in percent, their mean, that of the reference on the same sets, and on how many of them we
    are above it. Sets that are not there or cannot be used are in the settings, with the reason. Raises UserError when
    none can."""
    root = store.absolute(root).rstrip("/")
    numbers: dict[str, float] = {}
    how: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for name, row in SUITE.items():
        try:
            found = score(features, f"{root}/{name}", name, seed)
        except UserError as e:
            missing[name] = str(e)
            note(f"{name}: left out: {e}")
            continue
        numbers[name] = found.numbers[f"logistic/{row.metric}"]
        how[name] = {**found.settings, "of": _sizes(name), "reference": reference.get(name)}
        note(f"{name}: {row.metric} {numbers[name]:.2f} %")
    if not numbers:
        raise UserError(f"{root}: none of the {len(SUITE)} sets can be used; {next(iter(missing.values()))}")
    settings = {"missing": ", ".join(missing) or "none", "reasons": missing, **how}
    return Outcome({f"suite/{k}": v for k, v in (numbers | _summary(numbers, reference)).items()}, settings)


def score(features: Callable[[str], Labelled], place: str, name: str, seed: int) -> Outcome:
    """Of one set. Where it comes with a validation split and that is there, it finds lambda."""
    learn, test = splits(place, name)
    sets = [_checked(features(f"{place}/{split}"), f"{place}/{split}", name) for split in (*learn, test)]
    val = sets[1] if len(learn) == 2 else None
    return probe(sets[0], val, sets[-1], metric=SUITE[name].metric, seed=seed, note=lambda _: None)


def splits(place: str, name: str) -> tuple[tuple[str, ...], str]:
    """Those to learn from and the one to test on. Raises UserError when they are not there."""
    known = list(DATASETS[name].splits)
    whole, test = known[:2]
    there = {s for s in known if any(b.url.endswith(".tar") for b in files.directly(f"{place}/{s}/"))}
    if test not in there:
        raise UserError(f"{place}/{test}: no shards there")
    if {"train", "val"} <= there:
        return ("train", "val"), test
    if whole not in there:
        either = ", nor in both train and val beside it" if "val" in known else ""
        raise UserError(f"{place}/{whole}: no shards there{either}")
    return (whole,), test


def _checked(found: Labelled, place: str, name: str) -> Labelled:
    """With the marks of several classes where the set has them. Raises UserError for labels of another set."""
    several, classes = SUITE[name].metric == "map11", DATASETS[name].classes
    if not len(found.y):
        raise UserError(f"{place}: no image there has a label and decodes")
    top = int(found.y.max())
    if top >= (1 << 2 * classes if several else classes):
        raise UserError(f"{place}: label {top}, but {name} has {classes} classes")
    return Labelled(found.x, torch.from_numpy(multilabel.marks(found.y.cpu().numpy()))) if several else found


def _sizes(name: str) -> list[int]:
    """Images to learn from and to test on, in the whole set."""
    return list(DATASETS[name].splits.values())[:2]


def _summary(numbers: Mapping[str, float], reference: Mapping[str, float]) -> dict[str, float]:
    """Over the sets that both have; a draw is no win, as MNIST's in table 11."""
    both = [name for name in numbers if name in reference]
    out = {"average": sum(numbers.values()) / len(numbers), "sets": len(numbers)}
    if both:
        out["reference"] = sum(reference[name] for name in both) / len(both)
        out["wins"] = sum(numbers[name] > reference[name] for name in both)
    return out
