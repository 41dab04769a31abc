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

SCALES = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75)  # of the images behind DRLoc's and Swin's numbers; each is also mirrored
Net = Callable[[Tensor], Tensor]  # normalised images (B, 3, H, W) to scores (B, C, H, W)


def confusion(truth: Tensor, prediction: Tensor, classes: int) -> Tensor:
    """Return the confusion matrix (C, C): the number of pixels of each true class (rows) with each predicted class
    (columns). IGNORED pixels do not count."""
    known = truth != IGNORED
    pairs = truth[known].long() * classes + prediction[known].long()
    return torch.bincount(pairs, minlength=classes**2).view(classes, classes)


def class_scores(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the intersection over union and the accuracy (C,) of each class from a confusion matrix. The first is NaN
    for a class that is neither true nor predicted anywhere, the second for one that is nowhere true."""
    hit, truth, prediction = counts.diag().double(), counts.sum(1), counts.sum(0)
    return hit / (truth + prediction - hit), hit / truth


def scores(counts: Tensor) -> dict[str, float]:
    """Return mIoU and mAcc, means over the classes that occur, and aAcc over all pixels, in percent."""
    iou, accuracy = class_scores(counts)
    out = {"miou": iou.nanmean(), "macc": accuracy.nanmean(), "aacc": counts.diag().sum() / counts.sum()}
    return {name: 100 * float(value) for name, value in out.items()}


@torch.inference_mode()
def probabilities(
    net: Net, image: Tensor, *, size: int, scales: Sequence[float] = (1.0,), mirror: bool = False
) -> Tensor:
    """Return the class probabilities (C, H, W) of an image (3, H, W), uint8, on the device of the network. They are
    means over the image resized so that its short side is each of `scales` times `size`, and with `mirror` over the
    mirrored images too."""
    total = image.new_zeros((), dtype=torch.float)
    for scale in scales:
        x = resize(image[None], list(resized_shape(image, size, scale)), InterpolationMode.BILINEAR, antialias=True)
        x = normalise(x, x.device)
        for flipped in (False, True)[: 1 + mirror]:
            z = net(x.flip(-1) if flipped else x)
            z = F.interpolate(z.float(), image.shape[1:], mode="bilinear").softmax(1)[0]
            total = total + (z.flip(-1) if flipped else z)
    return total / (len(scales) * (1 + mirror))
