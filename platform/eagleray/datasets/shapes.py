"""Draw pictures of twenty classes, each a shape filled with a texture: a labelled data set without a download.

The class is the pair of shape and texture. Colours, light, position, scale, tilt and noise do not depend on it. They
vary within the ranges of crops, flips and colour jitter, so two views of a picture share little but the class."""

from collections.abc import Callable
from functools import cache

import numpy as np
from PIL import Image

Field = np.ndarray  # (H, H) float32, a value for each pixel
Mask = Callable[[Field, Field], Field]  # from x and y to values < 0 inside a shape, or > 0 where a texture has ink

LUMAS = np.array([0.2, 0.75, 0.45])  # luminance of background, shape and texture, so that they differ even in grey
CHROMA = 0.15  # strength of the colours, whose hues are drawn from the full circle, as jitter may rotate a hue that far
LUMA = np.array([0.299, 0.587, 0.114])  # weights of red, green and blue in luminance


def circle(x: Field, y: Field) -> Field:
    return np.hypot(x, y) - 1


def square(x: Field, y: Field) -> Field:
    return np.maximum(abs(x), abs(y)) - 0.87


def triangle(x: Field, y: Field) -> Field:
    return np.maximum(0.87 * abs(x) - 0.5 * y, y) - 0.6


def cross(x: Field, y: Field) -> Field:
    x, y = abs(x), abs(y)
    return np.maximum(np.minimum(x, y) - 0.36, np.maximum(x, y) - 1)


def ring(x: Field, y: Field) -> Field:
    return abs(np.hypot(x, y) - 0.74) - 0.28


def plain(u: Field, v: Field) -> Field:
    return np.full_like(u, -1)


def striped(u: Field, v: Field) -> Field:
    return abs(2 * (u % 1) - 1) - 0.5


def banded(u: Field, v: Field) -> Field:
    return striped(v, u)


def checked(u: Field, v: Field) -> Field:
    return striped(u, v) * banded(u, v)


SHAPES: tuple[Mask, ...] = (circle, square, triangle, cross, ring)
TEXTURES: tuple[Mask, ...] = (plain, striped, banded, checked)
CLASSES = tuple(f"{texture.__name__} {shape.__name__}" for shape in SHAPES for texture in TEXTURES)


def image(seed: int, index: int, *, size: int = 48) -> tuple[Image.Image, int]:
    """Draw the picture that belongs to a seed and an index, both at least 0, and return it with its class.

    Consecutive indices take the classes in turn."""
    label = index % len(CLASSES)
    shape, texture = SHAPES[label // len(TEXTURES)], TEXTURES[label % len(TEXTURES)]
    draw = np.random.Generator(np.random.Philox(key=np.array([seed, index], np.uint64)))
    paint = colours(draw)
    left, up = draw.uniform(-0.2, 0.2, 2).astype(np.float32)
    scale, period = np.float32(draw.uniform(0.6, 0.85)), np.float32(draw.uniform(0.42, 0.5))
    phase = draw.random(2, np.float32)
    x, y = grid(2 * size)  # drawn at twice the size and then averaged, for smooth edges
    u, v = rotate(x - left, y - up, draw.uniform(-0.15, 0.15))
    ink = texture(u / period + phase[0], v / period + phase[1]) > 0
    canvas = paint[np.where(shape(u / scale, v / scale) < 0, 1 + ink, 0)]
    canvas *= (1 + np.float32(draw.uniform(-0.35, 0.35)) * x)[..., None]  # light from one side; a flip swaps the sides
    canvas = canvas.reshape(size, 2, size, 2, 3).mean((1, 3))
    canvas += 0.05 * draw.standard_normal(canvas.shape, np.float32)
    return Image.fromarray((255 * canvas.clip(0, 1)).astype(np.uint8)), label


def colours(draw: np.random.Generator) -> np.ndarray:
    """Draw the colours (3, 3) of a picture under one exposure: background, shape and texture, in red, green and
    blue."""
    turns = draw.random(3)
    tint = np.cos(2 * np.pi * (turns[:, None] - np.arange(3) / 3)) * CHROMA * draw.uniform(0.9, 1, (3, 1))
    tint -= (tint @ LUMA)[:, None]  # a hue must not change the luminance
    exposure, contrast = draw.uniform(0.7, 1.3, 2)
    return (exposure * (0.5 + contrast * (LUMAS[:, None] - 0.5) + tint)).astype(np.float32)


def rotate(x: Field, y: Field, angle: float) -> tuple[Field, Field]:
    """Rotate coordinates by an angle in radians."""
    c, s = np.float32(np.cos(angle)), np.float32(np.sin(angle))
    return c * x - s * y, s * x + c * y


@cache
def grid(size: int) -> tuple[Field, Field]:
    """Return the x and y coordinates of the pixel centres, both (size, size), from -1 to 1."""
    axis = (np.arange(size, dtype=np.float32) + 0.5) * (2 / size) - 1
    x, y = np.meshgrid(axis, axis)
    return x, y
