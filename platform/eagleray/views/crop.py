"""Crops and resizes decoded uint8 images on the CPU."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as F

if TYPE_CHECKING:  # no import at run time: a model in MLflow has a copy of this file without the rest of eagleray
    from eagleray.config.view import View

NARROW = 8  # largest ratio of the longer to the shorter side at which a whole image is resized; see `centre_crop`
# The functions that torchvision's antialiased resize calls, in the overloads that write into a given tensor.
RESIZE = {"bilinear": torch.ops.aten._upsample_bilinear2d_aa.out, "bicubic": torch.ops.aten._upsample_bicubic2d_aa.out}


def crop(image: Tensor, boxes: NDArray[np.int64], views: "Sequence[View]", out: Sequence[Tensor]) -> None:
    """Cut a crop for each of V views out of an image (3, H, W), and write it, resized, into `out`, V tensors (3, S, S).

    The rows of `boxes` (V, 4) are top, left, height and width in pixels."""
    for (top, left, h, w), view, target in zip(boxes.tolist(), views, out, strict=True):
        part = image[None, :, top : top + h, left : left + w]
        RESIZE[view.interpolation](part, [view.size, view.size], False, None, None, out=target[None])


def centre_crop(image: Tensor, *, resize: int, size: int) -> Tensor:
    """Resize the shorter side to `resize` pixels, bicubic, and return the centre crop (3, size, size).

    If the longer side is more than NARROW times the shorter side, only the middle of the image is resized: resizing all
    of an image of 3,000,000 x 1 pixels would take 590 GB."""
    height, width = image.shape[1:]
    longest = NARROW * min(height, width) * max(1, math.ceil(size / resize))
    if max(height, width) > longest:
        image = F.center_crop(image, [min(height, longest), min(width, longest)])
    return F.center_crop(F.resize(image, [resize], InterpolationMode.BICUBIC, antialias=True), [size, size])
