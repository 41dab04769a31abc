"""The classifier that was trained, on images that it was not trained with."""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from eagleray.base import dist
from eagleray.data.index import Index
from eagleray.protocols.eval_mode import Net, evaluating
from eagleray.protocols.features import batches, labelled
from eagleray.views.photometric import normalised

TOP = 5


class Classifies(Net, Protocol):
    def classify(self, images: Tensor) -> Tensor:
        """Scores (B, C) of images (B, 3, H, W)."""


@torch.inference_mode()
@evaluating
def classifier(net: Classifies, index: Index, *, size: int, resize: int, device: torch.device) -> dict[str, float]:
    """Percent of the labelled images whose class is the likeliest, or one of the five likeliest; and the mean of the
    former over classes. Ranks share the images; the numbers are the same on all. Broken images are left out."""
    mine = np.array_split(labelled(index), dist.size())[dist.rank()]
    ys, places = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for found, images in batches(index, mine, size, resize):
        y = torch.from_numpy(index.label[found])
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            z = net.classify(normalised(images, device))
        best = z.float().topk(min(TOP, z.shape[1])).indices.cpu()  # (B, 5)
        hit = best == y.unsqueeze(1)
        ys.append(y.numpy())
        places.append(torch.where(hit.any(1), hit.int().argmax(1), TOP).numpy())
    parts = dist.objects((np.concatenate(ys), np.concatenate(places)))
    label, place = (np.concatenate(p) for p in zip(*parts, strict=True))
    return accuracies(label, place)


def accuracies(label: np.ndarray, place: np.ndarray) -> dict[str, float]:
    """Of classes (n,) and where they came in (n,), from 0 on."""
    if not len(label):
        return {}
    right = place == 0
    each = [right[label == y].mean() for y in np.unique(label)]
    out = {"top1": right.mean(), "top5": (place < TOP).mean(), "mean_per_class": np.mean(each)}
    return {f"classifier/{name}": 100 * float(value) for name, value in out.items()}
