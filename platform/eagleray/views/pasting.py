"""Pastes one image of a batch on another, in boxes drawn at random (Yang et al. 2021, arXiv:2102.08318).

B images of S pixels on a side. Boxes (B, 4) are left, top, right and bottom.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

DRAWS = 6  # uniform numbers that a box and a cut need
WIDEST = 2.0  # width over height, or height over width


def draw_boxes(u: Tensor, smallest: float, size: int) -> tuple[Tensor, Tensor]:
    """Return where images are pasted, in pixels of a background of `size`, and what of them, as shares of their sides.

    A cut is the largest of its aspect ratio that the square image holds. A box has the same ratio, so nothing is
    distorted, and fits as tightly as it can into two lengths, its shorter side into the shorter one, both between
    `smallest` and all of the background's side. Everything follows from the uniform numbers `u` (B, DRAWS).
    """
    ratio = torch.exp(math.log(WIDEST) * (2 * u[:, :1] - 1))  # width over height
    shape = torch.cat([ratio, 1 / ratio], 1).clamp(max=1)  # (B, 2) width and height; the longer is 1
    lengths = smallest + (1 - smallest) * u[:, 1:3]
    longer = torch.minimum(lengths.amax(1, keepdim=True), lengths.amin(1, keepdim=True) / shape.amin(1, keepdim=True))
    lengths = (size * longer * shape).round().clamp(min=1)
    corner = (u[:, 3:5] * (size - lengths)).floor()
    cut = u[:, 5:6] * (1 - shape)
    return torch.cat([corner, corner + lengths], 1), torch.cat([cut, cut + shape], 1)


def paste(images: Tensor, backgrounds: Tensor, boxes: Tensor, cuts: Tensor) -> Tensor:
    """Return the backgrounds (B, 3, S, S) with the cuts, in shares, of the images (B, 3, T, T) in their boxes."""
    pixels = torch.arange(backgrounds.shape[3], device=images.device, dtype=images.dtype) + 0.5
    first, last = boxes.unsqueeze(2).split(2, 1)  # (B, 2, 1)
    share = (pixels - first) / (last - first)  # (B, 2, S) of the box, x and y
    inside = (share > 0) & (share < 1)
    start, end = cuts.unsqueeze(2).split(2, 1)
    x, y = (2 * (start + (end - start) * share) - 1).unbind(1)  # (B, S) -1 to 1 over the image
    grid = torch.stack(torch.broadcast_tensors(x.unsqueeze(1), y.unsqueeze(2)), 3)  # (B, S, S, 2)
    pasted = F.grid_sample(images, grid, padding_mode="border", align_corners=False)
    return torch.where((inside[:, 0, None] & inside[:, 1, :, None]).unsqueeze(1), pasted, backgrounds)
