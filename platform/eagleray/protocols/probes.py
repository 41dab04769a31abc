"""Evaluate a backbone with kNN and a linear probe on labelled images, as a run does during training and at its end."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from eagleray.base import dist
from eagleray.base.errors import UserError
from eagleray.config.types import Format
from eagleray.data.digests import data_digest
from eagleray.data.index import Index
from eagleray.models.backbone import Backbone
from eagleray.protocols.catalogue import Knn, Linear
from eagleray.protocols.class_names import check_class_names
from eagleray.protocols.digests import digest
from eagleray.protocols.features import LabelledFeatures, extract_pooled, labelled_samples, subset
from eagleray.protocols.image_batches import THREADS, Reading
from eagleray.protocols.knn import knn
from eagleray.protocols.linear import linear
from eagleray.protocols.settings import Evaluate

RUN_PROTOCOLS = ("knn", "linear")  # the protocols that a run measures; they need labels
RECORDED = ("knn/top1", "knn/top5", "linear/top1", "linear/lr")  # the numbers of these protocols that a run records
ONE_IN = 10  # without a test set, one labelled sample in so many is held out


@dataclass(frozen=True)
class ProbeSets:
    """Labelled images to train a classifier on, and others to test it on."""

    train: Index
    train_samples: NDArray[np.int64]
    test: Index
    test_samples: NDArray[np.int64]

    @classmethod
    def of(cls, train: Index, test: Index | None, limit: int | None) -> "ProbeSets | None":
        """Select at most `limit` training images, and the test images; return None if the training shards have no
        labels.

        Without test shards, a tenth of the labelled training images is held out as the test set. Pretraining used these
        images, but not their labels."""
        if not train.labelled:
            return None
        samples = labelled_samples(train)
        if test is not None:
            return cls(train, subset(samples, limit), test, labelled_samples(test))
        held_out = subset(samples, max(len(samples) // ONE_IN, 1))
        return cls(train, subset(np.setdiff1d(samples, held_out), limit), train, held_out)

    def at_most(self, train: int, test: int) -> "ProbeSets":
        """Return the sets with at most so many training and test images."""
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
        """Describe the settings of a protocol and the number of images in words, for the log."""
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
    """Measure the numbers that a run records with kNN and a linear probe; return none without labelled images.

    Each rank extracts and keeps a share of the features, once for all protocols, and all return the same numbers."""
    if sets is None or not protocols:
        return {}
    extract = partial(extract_pooled, backbone, size=settings.size, resize=settings.resize, precision=precision)
    extract = partial(extract, bank=settings.bank, reading=reading)
    train, test = extract(sets.train, sets.train_samples), extract(sets.test, sets.test_samples)
    if not all(map(sum, zip(*dist.gather_objects((len(train.y), len(test.y))), strict=True))):
        return {}
    train, test = renumber(train, test, next(backbone.parameters()).device)
    numbers: dict[str, float] = {}
    if "knn" in protocols:  # without the further numbers of neighbours, which a run does not record
        numbers |= knn(train, test, Knn(**Knn.of_recipe(settings), ks=())).numbers
    if "linear" in protocols and settings.probe_epochs:
        numbers |= linear(train, test, Linear(**Linear.of_recipe(settings))).numbers
    out = {key: value for key, value in numbers.items() if key in RECORDED}
    return json.loads(dist.gather_objects(json.dumps(out))[0])  # type: ignore[no-any-return]


def renumber(
    train: LabelledFeatures, test: LabelledFeatures, device: torch.device
) -> tuple[LabelledFeatures, LabelledFeatures]:
    """Move this rank's training and test set to a device, and number the classes of all ranks from 0, as labels may be
    any numbers."""
    labels = [x for part in dist.gather_objects([train.y.unique(), test.y.unique()]) for x in part]
    classes = torch.cat(labels).unique()
    train, test = (LabelledFeatures(s.x.to(device), torch.searchsorted(classes, s.y).to(device)) for s in (train, test))
    return train, test
