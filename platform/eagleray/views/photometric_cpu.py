"""Applies the photometric operations to one uint8 crop after the other on the CPU, with OpenCV.

A crop stays in the processor's cache from its first operation to its last. All of them compute in float32, and one
rounding to uint8 ends them, so a pixel differs from `photometric.apply` by half a level of 255.
"""

import math

import cv2
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from eagleray.views.photometric import BRIGHTNESS, FIRST, FLIP, GRAY, JITTER, LUMA, SIGMA, SOLARIZE, TAPS

cv2.setNumThreads(0)  # loader processes share the cores already, and OpenCV's threads do not survive a fork

IDENTITY = np.eye(3, dtype=np.float32)
LUMINANCE = np.tile(np.array(LUMA, np.float32), (3, 1))  # (3, 3): every channel becomes the luminance
REACH = 5  # standard deviations after which a tap of the blur, below 4e-6, is left out


def apply_(crops: Tensor, params: Tensor) -> None:
    """Apply all operations but erasing to uint8 crops (B, 3, S, S) in place; their parameters are (B, 18)."""
    for planes, row in zip(crops.numpy(), params.numpy(), strict=True):
        if row[[JITTER, GRAY, SIGMA, SOLARIZE]].any():
            recolour_(planes, row)
        if row[FLIP]:
            for plane in planes:
                cv2.flip(plane, 1, dst=plane)


def recolour_(planes: NDArray[np.uint8], row: NDArray[np.float32]) -> None:
    """Change the colours of a crop, uint8 (3, S, S), in place, as its row (18,) of parameters says."""
    x = cv2.merge(list(planes)).astype(np.float32)  # (S, S, 3) in [0, 255]
    if row[JITTER]:
        for op in row[FIRST : FIRST + 4].astype(int):
            JITTERS[op](x, float(row[BRIGHTNESS + op]))
    if row[GRAY]:
        cv2.transform(x, LUMINANCE, dst=x)
    if row[SIGMA]:
        blur_(x, float(row[SIGMA]))
    if row[SOLARIZE]:
        np.subtract(255, x, out=x, where=x >= 128)
    cv2.split(cv2.convertScaleAbs(x), list(planes))  # rounds


def brightness_(x: NDArray[np.float32], factor: float) -> None:
    """Scale an image (S, S, 3) by a factor."""
    np.multiply(x, np.float32(factor), out=x)
    np.clip(x, 0, 255, out=x)


def contrast_(x: NDArray[np.float32], factor: float) -> None:
    """Blend an image with its mean luminance; factor 1 changes nothing."""
    mean = float(np.dot(cv2.mean(x)[:3], LUMA))
    np.multiply(x, np.float32(factor), out=x)
    np.add(x, np.float32((1 - factor) * mean), out=x)
    np.clip(x, 0, 255, out=x)


def saturation_(x: NDArray[np.float32], factor: float) -> None:
    """Blend an image with its luminance; factor 1 changes nothing."""
    cv2.transform(x, factor * IDENTITY + (1 - factor) * LUMINANCE, dst=x)
    np.clip(x, 0, 255, out=x)


def hue_(x: NDArray[np.float32], shift: float) -> None:
    """Rotate the hue of an image by `shift`, a fraction of the full circle, through HSV."""
    cv2.cvtColor(x, cv2.COLOR_RGB2HSV, dst=x)
    x[..., 0] += 360 * (shift % 1)  # from 0 to 720 degrees
    cv2.cvtColor(x, cv2.COLOR_HSV2RGB, dst=x)


def blur_(x: NDArray[np.float32], sigma: float) -> None:
    """Blur an image with a Gaussian of `sigma` pixels, with reflected borders."""
    reach = min(TAPS // 2, len(x) - 1, math.ceil(REACH * sigma))
    taps = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
    taps = (taps / taps.sum()).astype(np.float32)
    cv2.sepFilter2D(x, -1, taps, taps, dst=x, borderType=cv2.BORDER_REFLECT_101)


JITTERS = (brightness_, contrast_, saturation_, hue_)  # in the order of COLUMNS
