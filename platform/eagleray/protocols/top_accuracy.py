"""Measure the top-1 and top-5 accuracy of linear classifiers on centre crops, of which each rank has a share.

H classifiers, C classes, D features."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eagleray.base import dist
from eagleray.base.errors import UserError
from eagleray.data.index import Index, Note
from eagleray.models.backbone import Backbone
from eagleray.protocols.feature_shards import BATCH
from eagleray.protocols.features import LabelledFeatures, extract_features
from eagleray.protocols.image_batches import Reading

TOP = 5


def centre_crops(
    backbone: Backbone, classes: Tensor, index: Index, samples: NDArray[np.int64], *, size: int, resize: int, kind: str
) -> LabelledFeatures:
    """Return the features of this rank's share of the samples, on the device, with classes counted from 0. `classes`
    (C,) are their labels in ascending order. Called by all ranks together.

    Raises UserError when no image decodes."""
    reading = Reading.beside(classes.device)
    x, y = extract_features(backbone, index, samples, size=size, resize=resize, kinds=[kind], reading=reading)[kind]
    if not sum(dist.gather_objects(len(y))):
        raise UserError(f"{index.shards[0].url}: none of the labelled images in this shard and those beside it decodes")
    return LabelledFeatures(x.to(classes.device), torch.searchsorted(classes, y.to(classes.device)))


@torch.no_grad()
def top_accuracies(scores: Callable[[Tensor], Tensor], features: LabelledFeatures, heads: int) -> Tensor:
    """Return the top-1 and top-5 accuracies (H, 2) in percent on the features of all ranks.

    `scores` is a function that returns the class scores (b, H, C) of features (b, D), `heads` is H. Called by all ranks
    together."""
    hits = torch.zeros(heads, 2, dtype=torch.long, device=features.x.device)
    for x, y in zip(features.x.split(BATCH), features.y.split(BATCH), strict=True):
        z = scores(x)
        hit = z.topk(min(TOP, z.shape[2])).indices == y.view(-1, 1, 1)  # (b, H, 5)
        hits += torch.stack([hit[..., 0].sum(0), hit.sum((0, 2))], 1)
    return 100 * dist.total(hits).float() / sum(dist.gather_objects(len(features.y)))


def without_trivial(numbers: dict[str, float], classes: int, note: Note) -> dict[str, float]:
    """Return the numbers without those of top-5, which say nothing, if there are fewer than five classes."""
    if classes >= TOP:
        return numbers
    note(f"no top-5 accuracy: {classes} classes")
    return {name: value for name, value in numbers.items() if "top5" not in name}
