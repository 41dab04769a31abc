"""Crops and resizes images of a whole batch on a device, with the pixels that `crop` makes of each on a CPU.

A CPU's antialiased resize of uint8 pixels, by PyTorch as by Pillow, computes with integers: one pass along the rows and
one along the columns, whose weights have 16 bits and which both end in uint8. The same integers are the same pixels on
any device. Where a weight is rounded to 16 bits, none is so near to the middle that float64 could decide differently.

R rows of pixels, n crops of one size, S x S pixels of N channels, K taps: the pixels that a weight may be given to.
"""

import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eagleray.config.view import View

AT_ONCE = 2**24  # values after the first pass, which takes 8 bytes for each; more only where one crop has more
REACH = {"bilinear": 1.0, "bicubic": 2.0}  # pixels on either side, of an image that is not reduced
LIMIT, MOST_BITS = 2**15, 22  # a weight stays below LIMIT, and is shifted by at most MOST_BITS


def crop_batch(pixels: Tensor, boxes: NDArray[np.int64], views: Sequence[View]) -> Tensor:
    """Return the resized crops (V, B, N, S, S) of V views of one size, from decoded images on the device.

    `pixels` (P, N) are those of all images one after the other. Boxes (V, B, 4) say for each crop its first pixel, by
    how many one of its rows begins behind the one before, its height and its width. The host waits for nothing."""
    size, channels = views[0].size, pixels.shape[1]
    out = pixels.new_empty((math.prod(boxes.shape[:2]), channels, size, size))
    for interpolation in {view.interpolation: None for view in views}:
        mine = np.repeat([view.interpolation == interpolation for view in views], boxes.shape[1]).nonzero()[0]
        mine = mine[boxes.reshape(-1, 4)[mine, 2:].max(1).argsort(kind="stable")]  # a piece has taps for its largest
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
    """Return n crops (n, N, S, S); `boxes` are the four columns (n,) of `crop_batch`, of `rows` pixels of height
    together, and `longest` the largest height and width."""
    first, stride, height, width = boxes
    ends = height.cumsum(0)
    begins, row = ends - height, torch.arange(rows, device=pixels.device)
    crop = torch.searchsorted(ends, row, right=True)  # (R,) which of the crops a row is of
    starts = first[crop] + (row - begins[crop]) * stride[crop]
    at, weights, bits = weigh(width, longest[1], size, interpolation)
    at = (at[crop] + starts.unsqueeze(1)).int()  # (R, S)
    lines = _pass(pixels, at, (w[crop] for w in weights), bits[crop]).flatten(1)  # (R, S * N)
    at, weights, bits = weigh(height, longest[0], size, interpolation)
    at = (at + begins.unsqueeze(1)).int()  # (n, S)
    return _pass(lines, at, weights, bits).unflatten(2, (size, -1)).permute(0, 3, 1, 2)


def _pass(source: Tensor, at: Tensor, weights: Iterable[Tensor], bits: Tensor) -> Tensor:
    """Return the sums (m, S, C) of K rows of the source (P, C), from those `at` (m, S) on, times K weights (m, S),
    shifted by `bits` (m,) and rounded to uint8. What a weight of 0 is for may be any row."""
    sums = (1 << (bits - 1)).view(-1, 1, 1).expand(*at.shape, source.shape[1]).contiguous()
    for weight in weights:
        sums.addcmul_(source.index_select(0, at.flatten()).view(sums.shape), weight.unsqueeze(2))
        at.add_(1).clamp_(max=len(source) - 1)
    return sums.bitwise_right_shift_(bits.view(-1, 1, 1)).clamp_(0, 255).to(torch.uint8)


def weigh(length: Tensor, longest: int, size: int, interpolation: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return for lengths (n,) that are resized to S the first pixel (n, S) of each sum, the weights (K, n, S), and by
    how many bits these are shifted (n,). The longest length decides about K."""
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
    """Return the weight of a pixel at a distance: a triangle, or the cubic of Keys (1981) with a = -1/2."""
    x = x.abs()
    if interpolation == "bilinear":
        return (1 - x).clamp_(min=0)
    near = ((1.5 * x - 2.5) * x) * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return torch.where(x < 1, near, far.where(x < 2, 0))
