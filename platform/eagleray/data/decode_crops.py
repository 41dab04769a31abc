"""Decodes an image and draws the boxes of its crops. On request it decodes a large JPEG at 1/2, 1/4 or 1/8 of its size.

JPEG stores blocks of 8 x 8 pixels. A decoder can compute 4 x 4, 2 x 2 or 1 pixel of each in a fraction of the time. If
every crop is reduced further to the size of its view, the view hardly differs from that of the full image."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eagleray.base.errors import UserError
from eagleray.config.channels import Channel
from eagleray.data.costs import JPEG, check_jpeg, jpeg_size
from eagleray.data.decode import decode, orientation, upright
from eagleray.views import sampling
from eagleray.views.sampling import Views

Boxes = NDArray[np.int64]  # (V, 4) top, left, height and width in pixels
FACTORS = (8, 4, 2)


def check_scaled(channels: Sequence[Channel]) -> None:
    """Raises UserError for images with `channels`, and without simplejpeg, which decodes JPEGs at a reduced size."""
    if channels:
        raise UserError("decode=scaled: is for JPEGs in red, green and blue; use decode=full with channels")
    if find_spec("simplejpeg") is None:
        raise UserError("decode=scaled: needs the package simplejpeg, which is not installed; use decode=full")


def decode_boxes(
    data: bytes | memoryview,
    views: Views,
    u: NDArray[np.float64],
    *,
    scaled: bool = False,
    channels: Sequence[Channel] = (),
) -> tuple[Tensor, Boxes]:
    """Return the decoded image (3, H, W), or (N, H, W) with N `channels`, and the boxes of its crops in its pixels.

    With `scaled`, a JPEG is decoded at 1/2, 1/4 or 1/8 of its size where all its crops are at least 2, 4 or 8 times as
    large as their views. Raises BadImage."""

    def boxes(height: int, width: int) -> Boxes:
        return sampling.crops(views, u, height, width)

    found = _reduced(data, boxes, views.size) if scaled and data[:2] == JPEG else None
    if found is None:
        image = decode(data, channels)
        found = image, boxes(*image.shape[1:])
    return found


def factor(boxes: Boxes, sizes: NDArray[np.int64]) -> int:
    """Return the largest factor of 8, 4, 2 and 1 by which the image may shrink with no crop smaller than its view."""
    least = (boxes[:, 2:] // sizes[:, None]).min()
    return next((f for f in FACTORS if f <= least), 1)


def reduced(boxes: Boxes, by: int) -> Boxes:
    """Return the boxes in the pixels of an image reduced by the factor `by`. Both ends are rounded alike, so a side of
    n * `by` pixels becomes at least n pixels."""
    first, last = (boxes[:, :2] + by // 2) // by, (boxes[:, :2] + boxes[:, 2:] + by // 2) // by
    return np.concatenate([first, last - first], 1)


def _reduced(
    data: bytes | memoryview, boxes: Callable[[int, int], Boxes], sizes: NDArray[np.int64]
) -> tuple[Tensor, Boxes] | None:
    """Return a reduced image (3, h, w) and the boxes of its crops. None: the image must be decoded in full, or the
    decoder reports an error, which leaves the decision on the image to `decode`. Raises BadImage."""
    import simplejpeg

    height, width, channels = jpeg_size(data)
    if channels == 4 or min(height, width) < FACTORS[-1] * sizes.max():  # CMYK, or too small to be halved
        return None
    check_jpeg(data)
    turned = orientation(data)
    placed = boxes(width, height) if turned > 4 else boxes(height, width)
    by = factor(placed, sizes)
    if by == 1:
        return None
    least = {"min_height": -(-height // by), "min_width": -(-width // by)}
    try:
        pixels = simplejpeg.decode_jpeg(data, "RGB", min_factor=1, **least)
    except ValueError:
        return None
    if pixels.shape[:2] != (least["min_height"], least["min_width"]):
        return None
    return upright(torch.from_numpy(pixels).permute(2, 0, 1), turned), reduced(placed, by)
