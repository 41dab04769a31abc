"""Small labelled images whose classes a linear classifier tells apart in part."""

from pathlib import Path

import numpy as np
from PIL import Image

from eagleray.datasets.shards import Sample, encode, write_shards

SIDE, CLASSES = 32, 6


def draw(seed: int, count: int, classes: int = CLASSES) -> tuple[np.ndarray, np.ndarray]:
    """Return images (n, SIDE, SIDE, 3), uint8, and their classes (n,): a disc in the colour of its class, disturbed, in
    the middle of an image of any other colour."""
    rng = np.random.default_rng(seed)
    colours = np.random.default_rng(99).uniform(60, 200, (classes, 3))
    y = np.arange(count) % classes
    ground = rng.uniform(90, 170, (count, 1, 1, 3))
    figure = (colours[y] + 8 * rng.standard_normal((count, 3)))[:, None, None]
    at = np.abs(np.linspace(-1, 1, SIDE))
    inside = (at[:, None] ** 2 + at**2 < 0.6)[None, ..., None]
    x = np.where(inside, figure, ground) + 20 * rng.standard_normal((count, SIDE, SIDE, 3))
    return x.clip(0, 255).astype(np.uint8), y


def write(folder: Path, seed: int, count: int, classes: int = CLASSES) -> str:
    """Write such images as shards into a folder, with labels 10, 20, ... as labels may be any numbers."""
    x, y = draw(seed, count, classes)
    samples = (
        Sample(f"{i % 3}/{i:05d}", "png", encode(Image.fromarray(x[i])), 10 * int(y[i]) + 10) for i in range(count)
    )
    write_shards(samples, str(folder), size=200_000)
    return str(folder)
