"""Count the neighbours of each patch that show the same objects, and how often the most similar neighbours do so.

SelfPatch's loss takes the most similar neighbours for such true positives. They are counted as in its supplement,
appendix G (Yun et al. 2022, arXiv:2206.07990)."""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2.functional import center_crop, resize

from eagleray.dense.catalogue import Positives
from eagleray.dense.detection.data import Coco, Example
from eagleray.models.backbone import Backbone
from eagleray.models.patch_neighbors import most_similar_neighbours, neighbours
from eagleray.protocols.eval_mode import in_eval_mode
from eagleray.protocols.outcome import Outcome
from eagleray.views import photometric

THRESHOLD = 0.95  # lowest cosine of the class shares of two positive patches (appendix)


@torch.inference_mode()
@in_eval_mode
def positives(backbone: Backbone, folder: Path, settings: Positives) -> Outcome:
    """Count the true positives among neighbouring patches in the validation images of a folder in COCO's layout.

    Each image is resized to `size` pixels on its short side and cropped in the middle. The `chosen` most similar
    neighbours are those by the backbone's features. Raises UserError when an image or the annotations cannot be
    read."""
    coco, device = Coco.of(folder, "val"), next(backbone.parameters()).device
    counts, on_objects, right, taken, around = [], [], 0, 0, 0
    for i in range(len(coco)):
        crop, classes = class_map(coco[i], settings.size)
        out = backbone(photometric.normalise(crop[None].to(device), device))
        true, objects = positive_neighbours(classes, len(coco.categories), out.grid)
        index, real = (x[0].cpu() for x in most_similar_neighbours(out.patches, out.grid, settings.chosen, wrap=False))
        number = true.sum(1).double()  # (N,) true positives of each patch
        counts.append(number.mean().item())
        on_objects.append(number[objects])
        right += int((true.gather(1, index.clamp(min=0)) & real).sum())
        taken += int(real.sum())
        around += int((neighbours(out.grid, wrap=False) >= 0).sum())
    of_objects = torch.cat(on_objects)
    numbers = {
        "mean": float(np.mean(counts)),
        "deviation": float(np.std(counts)),
        **({"on_objects": of_objects.mean().item()} if len(of_objects) else {}),
        "chance": 100 * sum(counts) * len(true) / around,
        "precision": 100 * right / taken,
        "images": len(coco),
    }
    return Outcome({f"positives/{name}": value for name, value in numbers.items()})


def class_map(example: Example, size: int) -> tuple[Tensor, Tensor]:
    """Return the centre crop (3, S, S) of an image and the classes (S, S) of its pixels, 0 for the background.

    Where objects overlap, a pixel has the class of the smallest one."""
    masks = example.target["masks"]
    classes = torch.zeros(example.image.shape[1:], dtype=torch.int64)
    for i in masks.flatten(1).sum(1).argsort(descending=True, stable=True).tolist():
        classes[masks[i] > 0] = example.target["labels"][i]
    crop = center_crop(resize(example.image, [size], InterpolationMode.BICUBIC, antialias=True), [size, size])
    return crop, center_crop(resize(classes[None], [size], InterpolationMode.NEAREST), [size, size])[0]


def positive_neighbours(classes: Tensor, count: int, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return, for N patches, masks of neighbours with the same classes (N, N) and of patches that show objects (N,).

    A patch is described by the shares of its pixels that belong to each of `count` classes and to the background;
    `classes` (S, S) are those of the pixels. Two patches have the same classes if the cosine of their shares is at
    least THRESHOLD. A patch shows objects if they cover more than half of it. The grid of the patches is (h, w)."""
    shares = F.adaptive_avg_pool2d(F.one_hot(classes.long(), count + 1).permute(2, 0, 1).float(), grid).flatten(1).T
    same = (unit := F.normalize(shares, dim=1)) @ unit.T >= THRESHOLD
    candidates = neighbours(grid, wrap=False)  # (N, 8) neighbours of each patch
    around = torch.zeros(len(same), len(same) + 1, dtype=torch.bool).scatter_(1, candidates % (len(same) + 1), True)
    return same & around[:, :-1], shares[:, 0] < 0.5
