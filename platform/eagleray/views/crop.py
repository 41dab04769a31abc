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

if TYPE_CHECKING:  # a model in MLflow holds a copy of this file without the rest of eagleray
    from eagleray.config.view import View

NARROW = 8  # largest ratio of the sides of an image that is resized as a whole; `centre_crop` says why
# The functions that torchvision's antialiased resize calls. These overloads write into a given tensor.
RESIZE = {
    "bilinear": torch.ops.aten._upsample_bilinear2d_aa.out,
    "bicubic": torch.ops.aten._upsample_bicubic2d_aa.out,
}


def crop(image: Tensor, boxes: NDArray[np.int64], views: "Sequence[View]", out: Sequence[Tensor]) -> None:
    """Write the resized crop of each of V views of an image (3, H, W) into `out`, V tensors (3, S, S).

    The rows of `boxes` (V, 4) are top, left, height and width in pixels."""
    for (top, left, h, w), view, target in zip(boxes.tolist(), views, out, strict=True):
        part = image[None, :, top : top + h, left : left + w]
        RESIZE[view.interpolation](part, [view.size, view.size], False, None, None, out=target[None])


def centre_crop(image: Tensor, *, resize: int, size: int) -> Tensor:
    """Resize the shorter side to `resize` pixels, bicubic, and return the centre crop (3, size, size).

    Of an image whose longer side is more than NARROW times its shorter side, only the middle is resized: all of an
    image of 3,000,000 x 1 pixels would take 590 GB."""
    height, width = image.shape[1:]
    longest = NARROW * min(height, width) * max(1, math.ceil(size / resize))
    if max(height, width) > longest:
        image = F.center_crop(image, [min(height, longest), min(width, longest)])
    return F.center_crop(F.resize(image, [resize], InterpolationMode.BICUBIC, antialias=True), [size, size])
