"""Applies the photometric operations to uint8 crops on the CPU, one crop after the other, with OpenCV.

A crop stays in the CPU's cache from its first operation to its last. All operations compute in float32, and the result
is rounded to uint8 once, so a pixel differs from that of `photometric.apply` by at most half a level of 255."""

import math

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eagleray.config.view import APPLIED
from eagleray.views.colours import colours
from eagleray.views.photometric import (
    BRIGHTNESS,
    CUT,
    FIRST,
    LUMA,
    NOISE_STD,
    QUARTERS,
    RECROP,
    SIGMA,
    SWITCHES,
    TAPS,
    TURN,
    grain,
    sobel,
)

cv2.setNumThreads(0)  # the loader's processes already share the cores

Floats = NDArray[np.float32]
IDENTITY = np.eye(3, dtype=np.float32)
LUMINANCE = np.tile(np.array(LUMA, np.float32), (3, 1))  # (3, 3) matrix that turns every channel into the luminance
REACH = 5  # standard deviations beyond which the blur's taps are left out, as they are below 4e-6


def apply_(crops: Tensor, params: Tensor) -> None:
    """Apply all operations except erasing to uint8 crops (B, 3, S, S) in place. `params` (B, P) has a row per crop."""
    for planes, row in zip(crops.numpy(), params.numpy(), strict=True):
        order = [APPLIED[int(number)] for number in row[TURN : TURN + len(APPLIED)]]
        names = [name for name in order if row[SWITCHES[name]]]
        mirrored = bool(names) and names[-1] == "flip"  # a flip at the end is done apart: it is far faster in uint8
        if names := names[: len(names) - mirrored]:
            x = cv2.merge(list(planes)).reshape(*planes.shape[1:], -1).astype(np.float32)  # (S, S, 3) in [0, 255]
            for name in names:
                x = change(x, name, row)
            cv2.split(cv2.convertScaleAbs(x), list(planes))  # rounds to uint8
        if mirrored:
            for plane in planes:
                cv2.flip(plane, 1, dst=plane)


def change(x: Floats, name: str, row: Floats) -> Floats:
    """Return an image (S, S, 3), perhaps changed in place, after the operation `name` with parameters `row` (P,)."""
    match name:
        case "jitter":
            for op in row[FIRST : FIRST + 4].astype(int):
                if op < EVERY or x.shape[2] == len(LUMA):
                    JITTERS[op](x, float(row[BRIGHTNESS + op]))
        case "gray":
            cv2.transform(x, LUMINANCE, dst=x)
        case "blur":
            blur_(x, float(row[SIGMA]))
        case "solarize":
            np.subtract(255, x, out=x, where=x >= 128)
        case "flip":
            return np.ascontiguousarray(x[:, ::-1])
        case "rotate":
            return np.ascontiguousarray(np.rot90(x, int(row[QUARTERS])))
        case "recrop":
            top, left, h, w = row[RECROP : RECROP + 4].astype(int)
            box = np.ascontiguousarray(x[top : top + h, left : left + w])
            return np.asarray(cv2.resize(box, x.shape[:2], interpolation=cv2.INTER_LINEAR), x.dtype).reshape(x.shape)
        case "sobel":
            edges = sobel(torch.from_numpy(x).permute(2, 0, 1)[None] / 255)[0] * 255
            return np.ascontiguousarray(edges.expand(x.shape[2], -1, -1).permute(1, 2, 0).numpy())
        case "noise":
            drawn = grain(torch.empty(x.shape[2], *x.shape[:2]), torch.from_numpy(row)).permute(1, 2, 0).numpy()
            np.clip(x + 255 * row[NOISE_STD] * drawn, 0, 255, out=x)
        case "cutout":
            top, left, side = row[CUT : CUT + 3].astype(int)
            x[top : top + side, left : left + side] = 255 * np.array(colours(x.shape[2])[0], np.float32)
    return x


def brightness_(x: Floats, factor: float) -> None:
    """Scale an image (S, S, 3) by a factor."""
    np.multiply(x, np.float32(factor), out=x)
    np.clip(x, 0, 255, out=x)


def contrast_(x: Floats, factor: float) -> None:
    """Blend an image with the mean of its luminance, or of all channels if it is not RGB. A factor of 0 gives the mean,
    1 the image."""
    mean = float(np.dot(cv2.mean(x)[:3], LUMA)) if x.shape[2] == len(LUMA) else float(x.mean())
    np.multiply(x, np.float32(factor), out=x)
    np.add(x, np.float32((1 - factor) * mean), out=x)
    np.clip(x, 0, 255, out=x)


def saturation_(x: Floats, factor: float) -> None:
    """Blend an image with its luminance. A factor of 0 gives the luminance, 1 the image."""
    cv2.transform(x, factor * IDENTITY + (1 - factor) * LUMINANCE, dst=x)
    np.clip(x, 0, 255, out=x)


def hue_(x: Floats, shift: float) -> None:
    """Rotate the hue of an image in HSV by `shift`, a fraction of the full circle."""
    cv2.cvtColor(x, cv2.COLOR_RGB2HSV, dst=x)
    x[..., 0] += 360 * (shift % 1)  # 0 to 720 degrees
    cv2.cvtColor(x, cv2.COLOR_HSV2RGB, dst=x)


def blur_(x: Floats, sigma: float) -> None:
    """Blur an image with a Gaussian of `sigma` pixels. The borders are reflected."""
    reach = min(TAPS // 2, len(x) - 1, math.ceil(REACH * sigma))
    taps = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
    taps = (taps / taps.sum()).astype(np.float32)
    cv2.sepFilter2D(x, -1, taps, taps, dst=x, borderType=cv2.BORDER_REFLECT_101)


JITTERS = (brightness_, contrast_, saturation_, hue_)  # in the order of their columns in COLUMNS
EVERY = 2  # number of operations, the first in JITTERS, that work with any number of channels
