"""Score the predicted classes of pixels with mIoU, mAcc and aAcc, as mmsegmentation computes them.

Whole images are predicted, at one size or as a mean over several sizes and mirror images. There are C classes."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2.functional import resize

from eagleray.dense.segmentation.data import IGNORED, resized_shape
from eagleray.views.photometric import normalise

SCALES = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75)  # relative sizes, each also mirrored, as in DRLoc's and Swin's results
Net = Callable[[Tensor], Tensor]  # maps normalised images (B, 3, H, W) to scores (B, C, H, W)


def confusion(truth: Tensor, prediction: Tensor, classes: int) -> Tensor:
    """Return the confusion matrix (C, C): the number of pixels by true class (row) and predicted class (column).

    IGNORED pixels do not count."""
    known = truth != IGNORED
    pairs = truth[known].long() * classes + prediction[known].long()
    return torch.bincount(pairs, minlength=classes**2).view(classes, classes)


def class_scores(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the intersection over union (C,) and the accuracy (C,) of each class from a confusion matrix (C, C).

    The intersection over union is NaN for a class that no pixel has, neither by truth nor by prediction. The accuracy
    is NaN for a class that is not the true class of any pixel."""
    hit, truth, prediction = counts.diag().double(), counts.sum(1), counts.sum(0)
    return hit / (truth + prediction - hit), hit / truth


def scores(counts: Tensor) -> dict[str, float]:
    """Return mIoU, mAcc and aAcc in percent from a confusion matrix (C, C).

    mIoU and mAcc are means over classes, without those whose score is NaN. aAcc is the accuracy over all pixels."""
    iou, accuracy = class_scores(counts)
    out = {"miou": iou.nanmean(), "macc": accuracy.nanmean(), "aacc": counts.diag().sum() / counts.sum()}
    return {name: 100 * float(value) for name, value in out.items()}


@torch.inference_mode()
def probabilities(
    net: Net, image: Tensor, *, size: int, scales: Sequence[float] = (1.0,), mirror: bool = False
) -> Tensor:
    """Return the class probabilities (C, H, W) of an image (3, H, W), uint8, on the device of the network.

    They are means over `scales`: for each, the image is resized so that its short side is `size` * scale. With
    `mirror`, the mirror image is also predicted at each size."""
    total = image.new_zeros((), dtype=torch.float)
    for scale in scales:
        x = resize(image[None], list(resized_shape(image, size, scale)), InterpolationMode.BILINEAR, antialias=True)
        x = normalise(x, x.device)
        for flipped in (False, True)[: 1 + mirror]:
            z = net(x.flip(-1) if flipped else x)
            z = F.interpolate(z.float(), image.shape[1:], mode="bilinear").softmax(1)[0]
            total = total + (z.flip(-1) if flipped else z)
    return total / (len(scales) * (1 + mirror))
