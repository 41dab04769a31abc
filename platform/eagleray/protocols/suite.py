"""Evaluate frozen features on EsViT's suite of 18 datasets: Li et al. 2021, arXiv:2106.09785, tables 10 and 11."""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from eagleray.base.errors import UserError, explained
from eagleray.base.files import NO_JSON
from eagleray.datasets import multilabel
from eagleray.datasets.catalogue import DATASETS
from eagleray.datasets.sources import files
from eagleray.protocols.catalogue import SuiteOf18
from eagleray.protocols.features import LabelledFeatures, SuiteFeatures
from eagleray.protocols.logistic import probe
from eagleray.protocols.outcome import Outcome
from eagleray.storage import store
from eagleray.storage.shard_names import is_shard


class Row(NamedTuple):
    """A dataset of the suite: its metric, and the published values of this metric in percent (table 11)."""

    metric: str  # a key of classification_scores.METRICS
    resnet50: float  # supervised ResNet-50, as EsViT's authors measured it
    swint: float  # supervised Swin-T
    esvit: float  # EsViT with Swin-T


SUITE = {
    "food-101": Row("top1", 71.3, 77.4, 80.0),
    "cifar-10": Row("top1", 91.8, 94.0, 95.3),
    "cifar-100": Row("top1", 74.5, 77.5, 82.2),
    "sun397": Row("top1", 60.3, 64.3, 67.6),
    "cars": Row("top1", 50.1, 55.3, 66.4),
    "aircraft": Row("mean_per_class", 48.4, 51.5, 61.1),
    "voc2007": Row("map11", 83.6, 84.2, 85.5),
    "dtd": Row("top1", 72.6, 73.1, 78.1),
    "pets": Row("mean_per_class", 92.1, 93.3, 92.8),
    "caltech-101": Row("mean_per_class", 90.4, 90.8, 93.0),
    "flowers-102": Row("mean_per_class", 91.1, 91.5, 97.4),
    "mnist": Row("top1", 98.3, 98.3, 98.3),
    "fer2013": Row("top1", 55.9, 55.1, 59.3),
    "stl10": Row("top1", 97.0, 97.9, 98.9),
    "gtsrb": Row("top1", 75.7, 72.9, 84.3),
    "pcam": Row("top1", 82.6, 84.0, 84.6),
    "ucf101": Row("top1", 72.1, 79.0, 81.1),
    "hateful-memes": Row("roc_auc", 49.9, 51.2, 52.0),
}
# Published results of supervised backbones by the beginning of their timm names. The paper has none for larger Swins.
SUPERVISED = {
    "resnet50": {name: row.resnet50 for name, row in SUITE.items()},
    "swin_tiny": {name: row.swint for name, row in SUITE.items()},
}


def suite(
    data: SuiteFeatures, settings: SuiteOf18 = SuiteOf18(), note: Callable[[str], None] = lambda _: None
) -> Outcome:
    """Run the logistic probe on every dataset of the suite whose shards are in ROOT/NAME/SPLIT.

    The numbers are the metric of each dataset in percent, and their mean. If there is a reference, its mean on the same
    datasets and the number of datasets on which the backbone is better are added. The reference is the suite's results
    in the folder `reference` of another evaluation or, if this is None, the published results of the supervised
    backbone of the same timm name. The settings list the datasets that are missing or cannot be used, with the reason.
    Raises UserError when no dataset can be used, or the folder `reference` holds no results of the suite."""
    others = read_reference(settings.reference) if settings.reference else published(data.model)
    root = store.absolute(data.root).rstrip("/")
    numbers: dict[str, float] = {}
    details: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for name, row in SUITE.items():
        try:
            outcome = score(data.read, f"{root}/{name}", name, settings.seed)
        except UserError as e:
            missing[name] = str(e)
            note(f"{name}: left out: {e}")
            continue
        numbers[name] = outcome.numbers[f"logistic/{row.metric}"]
        details[name] = {**outcome.settings, "of": _sizes(name), "reference": others.get(name)}
        note(f"{name}: {row.metric} {numbers[name]:.2f} %")
    if not numbers:
        raise UserError(f"{root}: none of the {len(SUITE)} datasets can be used; {next(iter(missing.values()))}")
    details = {"missing": ", ".join(missing) or "none", "reasons": missing, **details}
    return Outcome({f"suite/{k}": v for k, v in (numbers | _summary(numbers, others)).items()}, details)


def published(model: str) -> dict[str, float]:
    """Return the published results of the supervised backbone `model` by dataset; empty if the paper has none."""
    return next((row for name, row in SUPERVISED.items() if model.startswith(name)), {})


def read_reference(folder: str) -> dict[str, float]:
    """Return the newest results of the suite in a folder or at a URL, by dataset. Results of an untrained backbone are
    used only if there are no others. Raises UserError if there are no results of the suite."""
    url = f"{store.absolute(folder).rstrip('/')}/results.json"
    with explained(f"--reference {folder}: {url} holds no results of the suite", *NO_JSON, why=False):
        results = [result for result in json.loads(files.read_text(url)) if result["protocol"] == "suite"]
        # --untrained measures random weights last, so the newest results may not be those of the trained backbone.
        newest = sorted(results, key=lambda result: not result.get("untrained"))[-1]["numbers"]
        return {name: float(newest[f"suite/{name}"]) for name in SUITE if f"suite/{name}" in newest}


def score(features: Callable[[str], LabelledFeatures], folder: str, name: str, seed: int) -> Outcome:
    """Run the logistic probe on one dataset. If the dataset has a validation split, lambda is picked on it."""
    training, test = splits(folder, name)
    sets = [_check(features(f"{folder}/{split}"), f"{folder}/{split}", name) for split in (*training, test)]
    val = sets[1] if len(training) == 2 else None
    return probe(sets[0], val, sets[-1], metric=SUITE[name].metric, seed=seed, note=lambda _: None)


def splits(folder: str, name: str) -> tuple[tuple[str, ...], str]:
    """Return the splits to train on and the split to test on, of those that have shards in a dataset's folder.

    Raises UserError when the shards of a split that is needed are missing."""
    known = list(DATASETS[name].splits)
    whole, test = known[:2]
    available = {s for s in known if any(is_shard(b.url) for b in files.list_folder(f"{folder}/{s}/"))}
    if test not in available:
        raise UserError(f"{folder}/{test}: no shards in this folder")
    if {"train", "val"} <= available:
        return ("train", "val"), test
    if whole not in available:
        either = ", nor in both train and val beside it" if "val" in known else ""
        raise UserError(f"{folder}/{whole}: no shards in this folder{either}")
    return (whole,), test


def _check(features: LabelledFeatures, url: str, name: str) -> LabelledFeatures:
    """Return features whose labels have been checked, and decoded to marks if an image may have several classes.

    Raises UserError when no image can be used, or when a label is too large for this dataset."""
    several, classes = SUITE[name].metric == "map11", DATASETS[name].classes
    if not len(features.y):
        raise UserError(f"{url}: no image in these shards has a label and can be decoded")
    top = int(features.y.max())
    if top >= (1 << 2 * classes if several else classes):
        raise UserError(f"{url}: label {top} is too large; {name} has {classes} classes")
    if not several:
        return features
    return LabelledFeatures(features.x, torch.from_numpy(multilabel.marks(features.y.cpu().numpy())))


def _sizes(name: str) -> list[int]:
    """Return the numbers of training and of test images that the complete dataset has."""
    return list(DATASETS[name].splits.values())[:2]


def _summary(numbers: Mapping[str, float], reference: Mapping[str, float]) -> dict[str, float]:
    """Return the mean of the results and their number; if there is a `reference`, also its mean and the number of wins.

    The reference counts for datasets that both have. Equal results, such as MNIST's in table 11, are no wins."""
    both = [name for name in numbers if name in reference]
    out = {"average": sum(numbers.values()) / len(numbers), "sets": len(numbers)}
    if both:
        out["reference"] = sum(reference[name] for name in both) / len(both)
        out["wins"] = sum(numbers[name] > reference[name] for name in both)
    return out
