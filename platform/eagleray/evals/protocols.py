"""Evaluations by name: what each is run on, and with which settings."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from eagleray import dist
from eagleray.data.index import Index
from eagleray.evals.correspondence import correspondence
from eagleray.evals.features import Labelled, extract, labelled, some
from eagleray.evals.knn import knn
from eagleray.evals.linear import probe
from eagleray.models.backbone import Backbone

if TYPE_CHECKING:
    from eagleray.recipe import Evaluate, Recipe

LABELLED = ("knn", "linear")  # those that need labels
PROTOCOLS = (*LABELLED, "correspondence")
HELD = 10  # one labelled sample in so many is held out where there is no test set


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

    def how(self, recipe: "Recipe", protocol: str) -> str:
        """The settings that a number was made with, for the reader of the number."""
        e = recipe.evaluate
        settings = f"k={e.k}, T={e.temperature:g}" if protocol == "knn" else f"{e.probe_epochs} epochs"
        return f" ({settings}; {len(self.bank_samples)} training, {len(self.test_samples)} test images)"


def evaluate(
    backbone: Backbone,
    sets: Sets | None,
    settings: "Evaluate",
    *,
    protocols: Sequence[str] = LABELLED,
    images: Index | None = None,
) -> dict[str, float]:
    """Named numbers; the same on every rank. Features are extracted once, by all ranks. `images` are for the protocols
    that need no labels."""
    size, resize = settings.size, settings.resize
    free: dict[str, float] = {}
    if "correspondence" in protocols:
        assert images is not None
        free = correspondence(backbone, images, size=size, resize=resize)
    if sets is None or not set(protocols) & set(LABELLED):
        return free
    train = extract(backbone, sets.bank, sets.bank_samples, size=size, resize=resize)
    test = extract(backbone, sets.test, sets.test_samples, size=size, resize=resize)
    out: dict[str, float] = {}
    if dist.rank() == 0 and len(train.x) and len(test.x):
        device = next(backbone.parameters()).device
        y = torch.cat([train.y, test.y]).unique(return_inverse=True)[1].to(device)  # labels may be any numbers
        train = Labelled(train.x.to(device), y[: len(train.y)])
        test = Labelled(test.x.to(device), y[len(train.y) :])
        if "knn" in protocols:
            out |= knn(train, test, k=settings.k, temperature=settings.temperature)
        if "linear" in protocols and settings.probe_epochs:
            out |= probe(train, test, epochs=settings.probe_epochs)
    return free | json.loads(dist.objects(json.dumps(out))[0])


def told(protocol: str, scores: dict[str, float]) -> str:
    """The numbers of a protocol in words."""
    if protocol == "correspondence":
        accuracy, error, images = (scores[f"correspondence/{name}"] for name in ("accuracy", "error", "images"))
        return f"accuracy {accuracy:.3f}, error {error:.2f} pixels ({images} images)"
    return f"top-1 {scores[f'{protocol}/top1']:.2f} %"
