"""Crops of a decoded image, on the CPU in uint8."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as F

from eagleray.config.view import View

# What torchvision's antialiased resize comes down to, with a place to write to.
RESIZE = {
    "bilinear": torch.ops.aten._upsample_bilinear2d_aa.out,
    "bicubic": torch.ops.aten._upsample_bicubic2d_aa.out,
}


def crop(image: Tensor, boxes: NDArray[np.int64], views: Sequence[View], out: Sequence[Tensor]) -> None:
    """Resized crops of an image (3, H, W) into `out`, V x (3, S, S); boxes (V, 4) are top, left, height, width."""
    for (top, left, h, w), view, place in zip(boxes.tolist(), views, out, strict=True):
        part = image[None, :, top : top + h, left : left + w]
        RESIZE[view.interpolation](part, [view.size, view.size], False, None, None, out=place[None])


def centre_crop(image: Tensor, *, resize: int, size: int) -> Tensor:
    """The evaluation view (3, size, size): short side to `resize`, bicubic, then the middle."""
    return F.center_crop(F.resize(image, [resize], InterpolationMode.BICUBIC, antialias=True), [size, size])
