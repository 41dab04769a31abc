"""Twenty classes of drawn pictures, a shape filled with a texture: the labelled set that needs no download.

What the label says is the outline and the pattern. Colours, place, scale, tilt, light, clutter and noise are drawn
without looking at it, so a backbone has to have learned something before its neighbours agree on a class.
"""

from collections.abc import Callable
from functools import cache

import numpy as np
from PIL import Image

Field = np.ndarray  # (H, W) float32 over the picture, H = W


def circle(x: Field, y: Field) -> Field:
    return np.hypot(x, y) - 1


def square(x: Field, y: Field) -> Field:
    return np.maximum(abs(x), abs(y)) - 0.85


def triangle(x: Field, y: Field) -> Field:
    return np.maximum(0.87 * abs(x) - 0.5 * y, y) - 0.6


def cross(x: Field, y: Field) -> Field:
    x, y = abs(x), abs(y)
    return np.maximum(np.minimum(x, y) - 0.38, np.maximum(x, y) - 1)


def ring(x: Field, y: Field) -> Field:
    return abs(np.hypot(x, y) - 0.75) - 0.28


def plain(u: Field, v: Field) -> Field:
    return np.full_like(u, -1)


def striped(u: Field, v: Field) -> Field:
    return abs(2 * (u % 1) - 1) - 0.5


def checked(u: Field, v: Field) -> Field:
    return striped(u, v) * striped(v, u)


def dotted(u: Field, v: Field) -> Field:
    return 0.32 - np.hypot(u % 1 - 0.5, v % 1 - 0.5)


SHAPES: tuple[Callable[[Field, Field], Field], ...] = (circle, square, triangle, cross, ring)
TEXTURES: tuple[Callable[[Field, Field], Field], ...] = (plain, striped, checked, dotted)
CLASSES = tuple(f"{texture.__name__} {shape.__name__}" for shape in SHAPES for texture in TEXTURES)


P = dict(
    tilt=0.3,
    half=(0.55, 0.85),
    place=0.12,
    period=(0.36, 0.5),
    sat=0.25,
    polarity=True,
    clutter=3,
    noise=0.04,
    light=0.25,
)


def image(seed: int, index: int, *, size: int = 48) -> tuple[Image.Image, int]:
    label = index % len(CLASSES)
    shape, texture = SHAPES[label // len(TEXTURES)], TEXTURES[label % len(TEXTURES)]
    draw = np.random.Generator(np.random.Philox(key=np.array([seed, index], np.uint64)))
    x, y = grid(2 * size)

    luma = draw.permutation([0.2, 0.5, 0.8]) if P["polarity"] else np.array([0.2, 0.5, 0.8])
    if P["polarity"] == 2 and draw.random() < 0.5:
        luma = luma[::-1]
    colours = luma[:, None] + draw.uniform(-0.06, 0.06, (3, 1)) + draw.uniform(-P["sat"], P["sat"], (3, 3))
    colours -= colours.mean(1, keepdims=True) - luma[:, None]
    colours = colours.astype(np.float32)

    half = draw.uniform(*P["half"])
    u, v = turned(
        x - draw.uniform(-P["place"], P["place"]),
        y - draw.uniform(-P["place"], P["place"]),
        draw.uniform(-P["tilt"], P["tilt"]),
    )
    period = draw.uniform(*P["period"])
    a, b = turned(u, v, P.get("tt", 0.0) * draw.uniform(-1, 1)) if P.get("tt") else (u, v)
    inside = shape(u / half, v / half) < 0
    ink = texture(a / period + draw.random(dtype=np.float32), b / period + draw.random(dtype=np.float32)) > 0
    ground = np.zeros_like(inside)
    amp = np.float32(draw.uniform(-P["light"], P["light"]))
    dirx, diry = turned(x, y, draw.uniform(0, 2 * np.pi))
    light = 1 + amp * dirx
    kind = np.where(inside, 1 + ink, 0)
    # clutter: faint discs on the ground
    tint = np.zeros_like(x)
    for cx, cy, r, t in draw.uniform((-1, -1, 0.1, -0.12), (1, 1, 0.4, 0.12), (P["clutter"], 4)).astype(np.float32):
        tint += t * ((x - cx) ** 2 + (y - cy) ** 2 < r * r)
    tint *= ~inside
    canvas = colours[kind] + tint[..., None]
    canvas *= light[..., None]
    canvas = canvas.reshape(size, 2, size, 2, 3).mean((1, 3))
    canvas += P["noise"] * draw.standard_normal(canvas.shape, np.float32)
    return Image.fromarray((255 * canvas.clip(0, 1)).astype(np.uint8)), label


def turned(x: Field, y: Field, angle: float) -> tuple[Field, Field]:
    c, s = np.float32(np.cos(angle)), np.float32(np.sin(angle))
    return c * x - s * y, s * x + c * y


@cache
def grid(size: int) -> tuple[Field, Field]:
    axis = (np.arange(size, dtype=np.float32) + 0.5) * (2 / size) - 1
    x, y = np.meshgrid(axis, axis)
    return x, y
