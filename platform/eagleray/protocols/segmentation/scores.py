"""Score predicted classes of pixels: mIoU, mAcc and aAcc over whole images, at one size or averaged over several sizes
and mirror images, as mmsegmentation computes them. C classes."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2.functional import resize

from eagleray.protocols.segmentation.data import IGNORED, resized_shape
from eagleray.views.photometric import normalise

SCALES = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75)  # of DRLoc's and Swin's numbers, each of them mirrored too
Net = Callable[[Tensor], Tensor]  # normalised images (B, 3, H, W) to scores (B, C, H, W)


def confusion(truth: Tensor, prediction: Tensor, classes: int) -> Tensor:
    """Count the pixels (C, C) of each true class, by row, with each predicted class; IGNORED ones do not count."""
    known = truth != IGNORED
    pairs = truth[known].long() * classes + prediction[known].long()
    return torch.bincount(pairs, minlength=classes**2).view(classes, classes)


def class_scores(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Intersection over union and accuracy (C,) of each class, NaN for one that no pixel has: of the union, or of the
    truth."""
    hit, truth, found = counts.diag().double(), counts.sum(1), counts.sum(0)
    return hit / (truth + found - hit), hit / truth


def scores(counts: Tensor) -> dict[str, float]:
    """Return mIoU and mAcc, means over the classes that occur, and aAcc over all pixels, in percent."""
    iou, accuracy = class_scores(counts)
    out = {"miou": iou.nanmean(), "macc": accuracy.nanmean(), "aacc": counts.diag().sum() / counts.sum()}
    return {name: 100 * float(value) for name, value in out.items()}


@torch.inference_mode()
def probabilities(
    net: Net, image: Tensor, *, size: int, scales: Sequence[float] = (1.0,), mirror: bool = False
) -> Tensor:
    """Probabilities (C, H, W) of the pixels of a uint8 image (3, H, W) on the net's device: means over sizes, the short
    side so many times `size`, and over its mirror image."""
    total = image.new_zeros((), dtype=torch.float)
    for scale in scales:
        x = resize(image[None], list(resized_shape(image, size, scale)), InterpolationMode.BILINEAR, antialias=True)
        x = normalise(x, x.device)
        for flipped in (False, True)[: 1 + mirror]:
            z = net(x.flip(-1) if flipped else x)
            z = F.interpolate(z.float(), image.shape[1:], mode="bilinear").softmax(1)[0]
            total = total + (z.flip(-1) if flipped else z)
    return total / (len(scales) * (1 + mirror))
