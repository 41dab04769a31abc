"""The held-out images of a run and what is measured on them: kNN and a linear probe with labels, crops without."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagleray.data.digests import data_digest
from eagleray.data.index import Index
from eagleray.models.backbone import Backbone
from eagleray.protocols.crop_retrieval import measure_crops
from eagleray.protocols.features import subset
from eagleray.protocols.probes import ProbeSets, evaluate
from eagleray.protocols.settings import Evaluate
from eagleray.runs.metrics import CROPS_FOUND, CROPS_LIDAR, LIDAR_ERROR
from eagleray.runs.plan import Plan

MOST = 1000  # images whose crops are compared: a difference of 4.5 points counts, and it costs 2,000 crops


@dataclass(frozen=True)
class Probed:
    """Labelled images, for a run with labels."""

    sets: ProbeSets

    @property
    def count(self) -> int:
        """Return the number of images that a score is a share of."""
        return len(self.sets.test_samples)

    @property
    def about(self) -> str:
        return f"kNN and a linear probe on {self.count:,} test images, trained and untrained"

    @property
    def digests(self) -> list[str]:
        """Return what says whether the images and labels of two runs are the same."""
        parts = (self.sets.train, self.sets.train_samples), (self.sets.test, self.sets.test_samples)
        return [data_digest(index, samples) for index, samples in parts]

    def describe(self, settings: Evaluate, protocol: str) -> str:
        return self.sets.describe(settings, protocol)

    def scores(self, backbone: Backbone, settings: Evaluate, **how: Any) -> dict[str, float]:
        """Return the scores of a backbone; `how` says how images are read and computed on."""
        return evaluate(backbone, self.sets, settings, **how)


@dataclass(frozen=True)
class Unlabelled:
    """Images without labels: those of `data.test`, else a fixed sample of the training images."""

    index: Index
    samples: NDArray[np.int64]
    name: str

    @property
    def count(self) -> int:
        return len(self.samples)

    @property
    def about(self) -> str:
        return (
            f"how often a second crop finds its own image, as there are no labels: {self.count:,} {self.name} images, "
            "trained and untrained"
        )

    @property
    def digests(self) -> list[str]:
        return [data_digest(self.index, self.samples)]

    def describe(self, settings: Evaluate, protocol: str) -> str:
        guess = f", of which a guess finds {100 / max(self.count, 1):.1f} %" * (protocol == "crops")
        return f"{self.count} {self.name} images{guess}"

    def scores(self, backbone: Backbone, settings: Evaluate, **how: Any) -> dict[str, float]:
        found = measure_crops(backbone, self.index, self.samples, size=settings.size, resize=settings.resize, **how)
        return dict(zip((CROPS_FOUND, CROPS_LIDAR, LIDAR_ERROR), found, strict=True)) if found else {}


HeldOut = Probed | Unlabelled


def held_out(plan: Plan) -> HeldOut:
    """Return the images that the backbone of a run is measured on at its end. No image is kept from the training."""
    if sets := ProbeSets.of(plan.index, plan.test, plan.recipe.evaluate.limit):
        return Probed(sets)
    index = plan.test or plan.index
    return Unlabelled(index, subset(np.arange(len(index)), MOST), "test" if plan.test else "training")
