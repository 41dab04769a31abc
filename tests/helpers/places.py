"""Pictures whose class is the place of a disc, which crops and flips hide: what pretraining with them makes worse."""

from pathlib import Path

import numpy as np
from PIL import Image

ROWS, COLUMNS, SIDE = 4, 5, 32


def picture(seed: int, number: int) -> tuple[Image.Image, int]:
    """Draw a picture and return it with its class. Colours, the background and the size of the disc are random."""
    draw, label = np.random.default_rng([seed, number]), number % (ROWS * COLUMNS)
    y, x = np.mgrid[:SIDE, :SIDE] / SIDE
    row, column = divmod(label, COLUMNS)
    up, left = (row + draw.uniform(0.3, 0.7)) / ROWS, (column + draw.uniform(0.3, 0.7)) / COLUMNS
    waves = np.sin(2 * np.pi * (draw.uniform(1, 6) * x + draw.uniform(1, 6) * y + draw.random()))
    ground, disc = draw.uniform(0.0, 0.4, 3), np.hypot(x - left, y - up) < draw.uniform(0.15, 0.25)
    canvas = np.where(waves[..., None] > 0, ground, ground + draw.uniform(-0.2, 0.2, 3))
    canvas = np.where(disc[..., None], draw.uniform(0.8, 1.0, 3), canvas)
    canvas = canvas + draw.normal(0, 0.05, canvas.shape)
    return Image.fromarray((255 * canvas.clip(0, 1)).astype(np.uint8)), label


def write_places(folder: Path, count: int, seed: int) -> Path:
    """Write pictures into a folder for each class, and return the folder of these."""
    for number in range(count):
        image, label = picture(seed, number)
        place = folder / f"{label:02d}"
        place.mkdir(parents=True, exist_ok=True)
        image.save(place / f"{number:05d}.png")
    return folder
