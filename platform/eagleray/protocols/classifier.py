"""Measure the accuracy of a classifier on test images."""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from eagleray.base import dist
from eagleray.config.types import Format
from eagleray.data.index import Index
from eagleray.engine.precision import autocast
from eagleray.protocols.eval_mode import Net, in_eval_mode
from eagleray.protocols.features import labelled_samples, own_samples
from eagleray.protocols.image_batches import THREADS, Reading, batches
from eagleray.views.photometric import normalise

TOP = 5


class ClassifierNet(Net, Protocol):
    """A network with a classification head."""

    def classify(self, images: Tensor) -> Tensor:
        """Return class scores (B, C) for images (B, 3, H, W)."""


@torch.inference_mode()
@in_eval_mode
def classifier(
    net: ClassifierNet,
    index: Index,
    *,
    size: int,
    resize: int,
    device: torch.device,
    precision: Format = "auto",
    reading: Reading = THREADS,
) -> dict[str, float]:
    """Measure top-1 and top-5 accuracy and the mean accuracy of the classes on an index's labelled images, in percent.

    The ranks share the images, and all return the same numbers. Images that do not decode are left out."""
    mine = own_samples(labelled_samples(index))
    ys, positions = [np.empty(0, np.int64)], [np.empty(0, np.int64)]

    def classify() -> None:
        for rows, images in batches(index, mine, size, resize, reading=reading, device=device):
            y = torch.from_numpy(index.label[rows])
            with autocast(device, precision):
                z = net.classify(normalise(images, device))
            best = z.float().topk(min(TOP, z.shape[1])).indices.cpu()  # (B, 5) classes with the highest scores
            hit = best == y.unsqueeze(1)
            ys.append(y.numpy())
            positions.append(torch.where(hit.any(1), hit.int().argmax(1), TOP).numpy())

    dist.together(classify)
    parts = dist.gather_objects((np.concatenate(ys), np.concatenate(positions)))
    label, position = (np.concatenate(p) for p in zip(*parts, strict=True))
    return accuracies(label, position)


def accuracies(label: np.ndarray, position: np.ndarray) -> dict[str, float]:
    """Return accuracies in percent for n images of classes `label` (n,). `position` (n,) is the rank of an image's
    class among all classes by predicted score: 0 if its score is the highest."""
    if not len(label):
        return {}
    right = position == 0
    each = [right[label == y].mean() for y in np.unique(label)]
    out = {"top1": right.mean(), "top5": (position < TOP).mean(), "mean_per_class": np.mean(each)}
    return {f"classifier/{name}": 100 * float(value) for name, value in out.items()}
