"""Pastes images on other images of their batch, in boxes drawn at random (Yang et al. 2021, arXiv:2102.08318).

A batch has B square images of S x S pixels. The columns of boxes (B, 4) are left, top, right and bottom."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

DRAWS = 6  # uniform random numbers that the box and the cut of one image take
WIDEST = 2.0  # largest ratio of a box's longer side to its shorter side


def draw_boxes(u: Tensor, smallest: float, size: int) -> tuple[Tensor, Tensor]:
    """Return the boxes (B, 4) to paste into, in pixels, and the cuts (B, 4) to paste, in fractions of an image's sides.

    An aspect ratio is drawn for each image. The cut is the largest part of the square image with this ratio. The box
    has the same ratio, so that nothing is distorted. Two lengths are drawn from `smallest` * `size` to `size`, the side
    of the background in pixels. The box is the largest whose longer side is at most the longer length and whose shorter
    side is at most the shorter length. `u` (B, DRAWS) are uniform random numbers."""
    ratio = torch.exp(math.log(WIDEST) * (2 * u[:, :1] - 1))  # width over height
    shape = torch.cat([ratio, 1 / ratio], 1).clamp(max=1)  # (B, 2) width and height, the longer one being 1
    lengths = smallest + (1 - smallest) * u[:, 1:3]
    longer = torch.minimum(lengths.amax(1, keepdim=True), lengths.amin(1, keepdim=True) / shape.amin(1, keepdim=True))
    lengths = (size * longer * shape).round().clamp(min=1)
    corner = (u[:, 3:5] * (size - lengths)).floor()
    cut = u[:, 5:6] * (1 - shape)
    return torch.cat([corner, corner + lengths], 1), torch.cat([cut, cut + shape], 1)


def paste(images: Tensor, backgrounds: Tensor, boxes: Tensor, cuts: Tensor) -> Tensor:
    """Return `backgrounds` (B, 3, S, S) with the `cuts` of `images` (B, 3, T, T) in the `boxes` of `draw_boxes`."""
    pixels = torch.arange(backgrounds.shape[3], device=images.device, dtype=images.dtype) + 0.5
    first, last = boxes.unsqueeze(2).split(2, 1)  # (B, 2, 1)
    share = (pixels - first) / (last - first)  # (B, 2, S) x and y of each pixel, 0 to 1 over the box
    inside = (share > 0) & (share < 1)
    start, end = cuts.unsqueeze(2).split(2, 1)
    x, y = (2 * (start + (end - start) * share) - 1).unbind(1)  # (B, S) coordinates, -1 to 1 over the image
    grid = torch.stack(torch.broadcast_tensors(x.unsqueeze(1), y.unsqueeze(2)), 3)  # (B, S, S, 2)
    pasted = F.grid_sample(images, grid, padding_mode="border", align_corners=False)
    return torch.where((inside[:, 0, None] & inside[:, 1, :, None]).unsqueeze(1), pasted, backgrounds)
