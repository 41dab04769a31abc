"""Crops and resizes images of a whole batch on a device, to the same pixels as `crop` does on a CPU.

On a CPU, PyTorch and Pillow compute the antialiased resize of uint8 pixels with integers: in one pass along the rows
and one along the columns, each with 16-bit weights and a uint8 result. So does this module, on any device. Weights are
computed in float64: as none is close to a half, all devices round them to the same integers. Letters in shapes: R rows
of pixels, n crops of S x S pixels, N channels, K taps (weights for each pixel of a crop)."""

import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eagleray.config.view import View

AT_ONCE = 2**24  # most values, of 8 bytes each, that the first pass computes at once; a single crop may have more
REACH = {"bilinear": 1.0, "bicubic": 2.0}  # reach of the kernel to either side in pixels, if the image is not reduced
LIMIT, MOST_BITS = 2**15, 22  # bound of an integer weight; most bits by which a weight is shifted left before rounding


def crop_batch(pixels: Tensor, boxes: NDArray[np.int64], views: Sequence[View]) -> Tensor:
    """Return the resized crops (V, B, N, S, S) of B decoded images on the device, for V views of one size.

    `pixels` (P, N) are those of all images, one image after another. The columns of `boxes` (V, B, 4) are the index of
    a crop's first pixel, its row stride in pixels, its height and its width. The host does not wait for the device."""
    size, channels = views[0].size, pixels.shape[1]
    out = pixels.new_empty((math.prod(boxes.shape[:2]), channels, size, size))
    for interpolation in {view.interpolation: None for view in views}:
        mine = np.repeat([view.interpolation == interpolation for view in views], boxes.shape[1]).nonzero()[0]
        # Crops are sorted by size, because the largest of those that are computed together decides their K.
        mine = mine[boxes.reshape(-1, 4)[mine, 2:].max(1).argsort(kind="stable")]
        chosen = boxes.reshape(-1, 4)[mine]
        table = torch.from_numpy(np.concatenate([mine[:, None], chosen], 1)).to(pixels.device, non_blocking=True)
        piece = np.cumsum(chosen[:, 2]) * (size * channels) // AT_ONCE
        ends = [0, *(np.flatnonzero(np.diff(piece)) + 1).tolist(), len(piece)]
        for first, last in itertools.pairwise(ends):
            rows, longest = int(chosen[first:last, 2].sum()), chosen[first:last, 2:].max(0).tolist()
            where, *placed = table[first:last].unbind(1)
            out.index_copy_(0, where, _resized(pixels, placed, rows, longest, size, interpolation))
    return out.unflatten(0, boxes.shape[:2])


def _resized(
    pixels: Tensor, boxes: Sequence[Tensor], rows: int, longest: Sequence[int], size: int, interpolation: str
) -> Tensor:
    """Return n resized crops (n, N, S, S). `boxes` are the four columns (n,) of their boxes as in `crop_batch`. `rows`
    is the sum of their heights, `longest` their largest height and their largest width."""
    first, stride, height, width = boxes
    ends = height.cumsum(0)
    begins, row = ends - height, torch.arange(rows, device=pixels.device)
    crop = torch.searchsorted(ends, row, right=True)  # (R,) the crop that each row belongs to
    starts = first[crop] + (row - begins[crop]) * stride[crop]
    at, weights, bits = weigh(width, longest[1], size, interpolation)
    at = (at[crop] + starts.unsqueeze(1)).int()  # (R, S)
    lines = _pass(pixels, at, (w[crop] for w in weights), bits[crop]).flatten(1)  # (R, S * N)
    at, weights, bits = weigh(height, longest[0], size, interpolation)
    at = (at + begins.unsqueeze(1)).int()  # (n, S)
    return _pass(lines, at, weights, bits).unflatten(2, (size, -1)).permute(0, 3, 1, 2)


def _pass(source: Tensor, at: Tensor, weights: Iterable[Tensor], bits: Tensor) -> Tensor:
    """Return weighted sums (m, S, C), each of K successive rows of `source` (P, C) from row `at` (m, S) on. `weights`
    are K tensors (m, S), 0 for rows beyond the last. Sums are shifted right by `bits` (m,) and rounded to uint8."""
    sums = (1 << (bits - 1)).view(-1, 1, 1).expand(*at.shape, source.shape[1]).contiguous()
    for weight in weights:
        sums.addcmul_(source.index_select(0, at.flatten()).view(sums.shape), weight.unsqueeze(2))
        at.add_(1).clamp_(max=len(source) - 1)
    return sums.bitwise_right_shift_(bits.view(-1, 1, 1)).clamp_(0, 255).to(torch.uint8)


def weigh(length: Tensor, longest: int, size: int, interpolation: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return how to resize n lines of `length` (n,) pixels to `size` = S: the first pixel (n, S) of each weighted sum,
    integer weights (K, n, S), and the bits (n,) by which they are shifted. The largest length, `longest`, sets K."""
    reach, taps = REACH[interpolation], 2 * math.ceil(REACH[interpolation] * max(longest / size, 1)) + 1
    scale = (length.double() / size).unsqueeze(1)
    centre = scale * (torch.arange(size, device=length.device) + 0.5)  # (n, S)
    wide = scale.clamp(min=1)
    first = (centre - reach * wide + 0.5).long().clamp_(min=0)
    last = torch.minimum((centre + reach * wide + 0.5).long(), length.unsqueeze(1))
    pixel = first + torch.arange(taps, device=length.device).view(-1, 1, 1)  # (K, n, S)
    weights = torch.where(pixel < last, kernel((pixel - centre + 0.5) * (1 / wide), interpolation), 0)
    weights /= weights.sum(0)
    shifts = 1 << torch.arange(1, MOST_BITS + 1, device=length.device)
    bits = ((weights.amax((0, 2)).unsqueeze(1) * shifts + 0.5).long() < LIMIT).sum(1)
    weights *= (1 << bits).unsqueeze(1)
    return first, (weights + torch.copysign(torch.full_like(weights, 0.5), weights)).int(), bits.int()


def kernel(x: Tensor, interpolation: str) -> Tensor:
    """Return the weights at distances x in pixels: a triangle, or the cubic kernel of Keys (1981) with a = -1/2."""
    x = x.abs()
    if interpolation == "bilinear":
        return (1 - x).clamp_(min=0)
    near = ((1.5 * x - 2.5) * x) * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return torch.where(x < 1, near, far.where(x < 2, 0))
