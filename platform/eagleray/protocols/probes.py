"""Evaluate a backbone with kNN and a linear probe on labelled images. A run does so during training and at its end."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from eagleray.base import dist
from eagleray.base.errors import Outage, UserError
from eagleray.config.types import Format
from eagleray.data.digests import data_digest
from eagleray.data.file_names import from_text, readable
from eagleray.data.image_folder import is_folder_blob
from eagleray.data.index import Index
from eagleray.models.backbone import Backbone
from eagleray.protocols.digests import digest
from eagleray.protocols.features import LabelledFeatures, extract_pooled, labelled_samples, subset
from eagleray.protocols.image_batches import THREADS, Reading
from eagleray.protocols.knn import knn
from eagleray.protocols.linear import linear
from eagleray.protocols.settings import Evaluate
from eagleray.storage import store

RUN_PROTOCOLS = ("knn", "linear")  # protocols that a run measures; both need labels
RECORDED = ("knn/top1", "knn/top5", "linear/top1", "linear/lr")  # results of these protocols that a run records
ONE_IN = 10  # without a test set, one in ten labelled samples is held out


@dataclass(frozen=True)
class ProbeSets:
    """Labelled images: a set to train a classifier on, and a set to test it on."""

    train: Index
    train_samples: NDArray[np.int64]
    test: Index
    test_samples: NDArray[np.int64]

    @classmethod
    def of(cls, train: Index, test: Index | None, limit: int | None) -> "ProbeSets | None":
        """Return at most `limit` training images, and all test images; None if the training shards have no labels.

        Without test shards, a tenth of the labelled training images is held out as the test set. Pretraining has seen
        these images, but not their labels."""
        if not train.labelled:
            return None
        samples = labelled_samples(train)
        if test is not None:
            return cls(train, subset(samples, limit), test, labelled_samples(test))
        held_out = subset(samples, max(len(samples) // ONE_IN, 1))
        return cls(train, subset(np.setdiff1d(samples, held_out), limit), train, held_out)

    def at_most(self, train: int, test: int) -> "ProbeSets":
        """Return the sets with at most `train` training images and `test` test images."""
        return replace(
            self, train_samples=subset(self.train_samples, train), test_samples=subset(self.test_samples, test)
        )

    @property
    def digest(self) -> str:
        """The digest of both sets of images and their labels."""
        return digest([data_digest(self.train, self.train_samples), data_digest(self.test, self.test_samples)])

    def check(self) -> None:
        """Raise UserError when a classifier trained on the training set cannot be tested on the test set."""
        train, test = np.unique(self.train.label[self.train_samples]), np.unique(self.test.label[self.test_samples])
        if not len(test):
            raise UserError("--test: these shards have no labels, and this protocol needs them")
        if len(train) < 2:
            raise UserError(f"--train: {len(train)} class(es) in these shards; a classifier needs two or more")
        if self.test is not self.train:
            check_class_names(self.train, self.test)
        if strange := np.setdiff1d(test, train).tolist():
            examples = ", ".join(map(str, strange[:5])) + (", ..." if strange[5:] else "")
            if self.test is self.train:
                raise UserError(
                    f"--train: all images of {len(strange)} of its {len(np.union1d(train, test))} classes are held out "
                    f"to test on: {examples}; expected --test URL, or more images of each class"
                )
            raise UserError(
                f"--test: {len(strange)} of the {len(test)} classes in these shards are not in --train: {examples}"
            )
        both = {b.url for b in self.train.shards} & {b.url for b in self.test.shards}
        if both and self.test is not self.train:
            raise UserError(f"--test: the shard {min(both)} is also in --train; expected other images to test on")

    def describe(self, settings: Evaluate, protocol: str) -> str:
        """Return the settings of a protocol and the numbers of images as text for the log."""
        words = (
            f"k={settings.k}, T={settings.temperature:g}" if protocol == "knn" else f"{settings.probe_epochs} epochs"
        )
        return f"{words}; {len(self.train_samples)} training, {len(self.test_samples)} test images"


def evaluate(
    backbone: Backbone,
    sets: ProbeSets | None,
    settings: Evaluate,
    *,
    protocols: Sequence[str] = RUN_PROTOCOLS,
    precision: Format = "auto",
    reading: Reading = THREADS,
) -> dict[str, float]:
    """Measure kNN and a linear probe, and return the results that a run records; none without labelled images.

    Each rank extracts the features of a share of the images, once for all protocols. All return the same results."""
    if sets is None or not protocols:
        return {}
    extract = partial(extract_pooled, backbone, size=settings.size, resize=settings.resize, precision=precision)
    extract = partial(extract, bank=settings.bank, reading=reading)
    train, test = extract(sets.train, sets.train_samples), extract(sets.test, sets.test_samples)
    if not all(map(sum, zip(*dist.gather_objects((len(train.y), len(test.y))), strict=True))):
        return {}
    train, test = renumber(train, test, next(backbone.parameters()).device)
    numbers: dict[str, float] = {}
    if "knn" in protocols:
        numbers |= knn(train, test, k=settings.k, temperature=settings.temperature)
    if "linear" in protocols and settings.probe_epochs:
        numbers |= linear(train, test, epochs=settings.probe_epochs)
    out = {key: value for key, value in numbers.items() if key in RECORDED}
    return json.loads(dist.gather_objects(json.dumps(out))[0])  # type: ignore[no-any-return]


def renumber(
    train: LabelledFeatures, test: LabelledFeatures, device: torch.device
) -> tuple[LabelledFeatures, LabelledFeatures]:
    """Move this rank's sets to a device, and replace labels, any integers, by classes that all ranks count from 0."""
    labels = [x for part in dist.gather_objects([train.y.unique(), test.y.unique()]) for x in part]
    classes = torch.cat(labels).unique()
    train, test = (LabelledFeatures(s.x.to(device), torch.searchsorted(classes, s.y).to(device)) for s in (train, test))
    return train, test


def class_names(index: Index) -> dict[int, set[str]]:
    """Return the names of classes by label: several for a class if parts of the data disagree. Unnamed classes are
    missing.

    In a folder of images, the names are those of its subfolders. Shards have them in their dataset.json, and Parquet
    files in the metadata that the library `datasets` writes."""
    known = [_of_images(index, shard) for shard, blob in enumerate(index.shards) if is_folder_blob(blob)]
    of_parquet = [names for shard in range(len(index.shards)) if (names := index.classes(shard)) is not None]
    known += [dict(enumerate(names)) for names in dict.fromkeys(map(tuple, of_parquet))]
    others = (blob for shard, blob in enumerate(index.shards) if index.classes(shard) is None)
    folders = {store.parent(blob.url) for blob in others if not is_folder_blob(blob)}
    known += [_of_card(folder) for folder in sorted(folders)]
    out: dict[int, set[str]] = {}
    for number, name in (item for names in known for item in names.items()):
        out.setdefault(number, set()).add(name)
    return out


def check_class_names(train: Index, test: Index, keys: tuple[str, str] = ("--train", "--test")) -> None:
    """Check that a label is the same class in the training and the test set, as far as both name their classes.

    `keys` are the options or recipe keys of the two sets. Raises UserError when a label has two names, and when the
    training set lacks a class of the test set."""
    ours, theirs = class_names(train), class_names(test)
    if lacking := _lacking(train, ours, theirs):
        raise UserError(f"{keys[1]}: {keys[0]} has no class {lacking[0]}; expected classes of the same names in both")
    for number in sorted(ours.keys() & theirs.keys()):
        if len(ours[number] | theirs[number]) > 1:
            here, there = (" or ".join(sorted(names[number])) for names in (theirs, ours))
            raise UserError(
                f"{keys[1]}: class {number} is {here}, and in {keys[0]} it is {there}: classes are numbered in the "
                "order of their names; expected the same names in both, such as folders of links to the shared ones"
            )


def _lacking(train: Index, ours: dict[int, set[str]], theirs: dict[int, set[str]]) -> list[str]:
    """Return the names of classes in the test set (`theirs`) that the training set (`ours`) lacks. A name does not
    count if the training set has its label without a name, as that class may have the same name."""
    known = set[str]().union(*ours.values())
    strange = {number: min(names - known) for number, names in theirs.items() if known and names - known}
    if not strange:
        return []
    unnamed = set(np.unique(train.label).tolist()) - ours.keys()
    return sorted(name for number, name in strange.items() if number not in unnamed)


def _of_images(index: Index, shard: int) -> dict[int, str]:
    """Return the class names of a folder of images, those of its subfolders, by label."""
    table = index.column(shard, ["key", "label"])
    numbers, first = np.unique(table["label"].to_numpy(), return_index=True)
    paths = map(from_text, table["key"].take(first).to_pylist())
    return {
        number: readable(path.partition("/")[0])
        for number, path in zip(numbers.tolist(), paths, strict=True)
        if number >= 0
    }


def _of_card(folder: str) -> dict[int, str]:
    """Return the class names in the dataset.json of a folder of shards by label; none if Eagleray did not write it."""
    from eagleray.datasets import card

    try:
        names: Any = (card.find(folder) or {}).get("class_names")
    except (UserError, OSError, Outage):  # the file is not Eagleray's, or the store does not say whether it exists
        return {}
    known = names if isinstance(names, list) else []
    return {number: name for number, name in enumerate(known) if name and isinstance(name, str)}
