"""The pictures of evaluations: sheets of images in rows and columns, and matched patches of two images."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from eagleray.base.plotting import DPI, INK

Pixels = NDArray[np.float32]  # (H, W, 3) from 0 to 1

SIDE, LABEL, GAP, TOP = (
    1.55,
    0.95,
    0.08,
    0.5,
)  # inches: a tile's height, room for the label of a row, between, the title
CAPTION = 0.2  # inches over each tile
LONGEST = 480  # pixels of a tile at most, so that a page stays small
RED, GREEN, YELLOW = "#d5402b", "#2f8f4e", "#f2c200"
# Of objects in videos, in the order of their numbers; far apart also for those who see few colours.
COLOURS = np.array([(230, 97, 0), (26, 133, 255), (212, 17, 89), (254, 204, 2), (93, 58, 155), (64, 176, 166)]) / 255
OVER = 0.6  # share of a heat map or a mask in the colour of a pixel


class Tile(NamedTuple):
    """An image with words over it; points (x, y) in shares of its sides are marked, and a mask's outline is drawn."""

    image: Pixels
    title: str = ""
    points: Sequence[tuple[float, float]] = ()
    outline: NDArray[np.bool_] | None = None  # (H, W), of the image's size
    edge: str = ""  # colour of a frame around it


class Pair(NamedTuple):
    """Two images of one height, matched points in each (k, 2), x and y in pixels, and whether each match is right;
    None where nobody knows."""

    one: Pixels
    other: Pixels
    ends: NDArray[np.float64]  # (k, 4) x and y in one, x and y in the other
    right: NDArray[np.bool_] | None
    title: str


def pixels(image: Tensor) -> Pixels:
    """Of a uint8 image (3, H, W)."""
    return np.divide(image.permute(1, 2, 0).cpu().numpy(), 255, dtype=np.float32)


def heated(image: Tensor, heat: Tensor) -> Pixels:
    """An image (3, H, W) under a map (h, w) of numbers that are not negative; the largest is the brightest."""
    from matplotlib import colormaps

    large = enlarged(heat / heat.max().clamp(min=1e-12), image)
    return (1 - OVER) * pixels(image) + OVER * colormaps["inferno"](large)[..., :3].astype(np.float32)


def coloured(image: Tensor, colours: Tensor) -> Pixels:
    """Colours of patches (h, w, 3) at the size of an image (3, H, W)."""
    return np.stack([enlarged(c, image) for c in colours.unbind(-1)], -1)


def dimmed(image: Tensor, kept: Tensor) -> Pixels:
    """An image (3, H, W) that is dark where patches (h, w) are not kept."""
    return pixels(image) * (0.15 + 0.85 * enlarged(kept.float(), image)[..., None])


def enlarged(grid: Tensor, image: Tensor) -> NDArray[np.float32]:
    """A map (h, w) at the size of the image, patches as squares."""
    out: NDArray[np.float32] = F.interpolate(grid[None, None].float(), image.shape[1:])[0, 0].cpu().numpy()
    return out


def painted(image: Tensor, mask: NDArray[np.uint8]) -> Pixels:
    """An image (3, H, W) with its objects (H, W) in their colours, half as large."""
    out = pixels(image)
    on = mask > 0
    out[on] = (1 - OVER) * out[on] + OVER * COLOURS[(mask[on] - 1) % len(COLOURS)]
    return out


def sheet(rows: Mapping[str, Sequence[Tile]], path: Path, title: str) -> Path:
    """Rows of tiles, each as high as the others and as wide as its image, with a label on the left of each row."""
    from matplotlib.figure import Figure

    widths = [max(row[i].image.shape[1] / row[i].image.shape[0] for row in rows.values() if i < len(row))
              for i in range(max(map(len, rows.values())))]  # fmt: skip
    width = LABEL + sum(SIDE * w + GAP for w in widths)
    height = TOP + len(rows) * (SIDE + CAPTION + GAP)
    figure = Figure(figsize=(max(width, 5.0), height), dpi=DPI)
    write(figure, title, height)
    for i, (label, row) in enumerate(rows.items()):
        bottom = height - TOP - (i + 1) * (SIDE + CAPTION + GAP) + GAP
        figure.text(
            GAP / figure.get_figwidth(), (bottom + SIDE / 2) / height, label, fontsize=8, color=INK, va="center"
        )
        left = LABEL
        for tile, w in zip(row, widths, strict=False):
            size = figure.get_figwidth()
            fill(figure.add_axes((left / size, bottom / height, SIDE * w / size, SIDE / height)), tile)
            left += SIDE * w + GAP
    figure.savefig(path)
    return path


def fill(axes: Any, tile: Tile) -> None:
    image = tile.image
    h, w = image.shape[:2]
    thin = max(max(h, w) // LONGEST, 1)
    extent = (0, w, h, 0)
    axes.imshow(image[::thin, ::thin].clip(0, 1), extent=extent, interpolation="nearest")
    if tile.outline is not None and tile.outline.any() and not tile.outline.all():
        axes.contour(tile.outline, levels=[0.5], colors="white", linewidths=0.9, extent=(0, w, 0, h))
    for x, y in tile.points:
        axes.plot(x * w, y * h, "+", color="white", markersize=11, markeredgewidth=3.4)
        axes.plot(x * w, y * h, "+", color=RED, markersize=10, markeredgewidth=1.6)
    axes.set(xlim=(0, w), ylim=(h, 0), xticks=[], yticks=[])
    axes.set_title(tile.title, fontsize=7, color=INK, pad=2)
    axes.spines[:].set(visible=bool(tile.edge), color=tile.edge or INK, linewidth=2)


def pairs(matched: Sequence[Pair], path: Path, title: str) -> Path:
    """Pairs of images, two to a row, and lines between the points that match: green where right, red where not, yellow
    where nobody knows."""
    from matplotlib.figure import Figure

    side = 1.6 * SIDE
    rows = -(-len(matched) // 2)
    height = TOP + rows * (side + CAPTION + GAP)
    column = max((p.one.shape[1] + p.other.shape[1]) / p.one.shape[0] for p in matched) * side + 4 * GAP
    figure = Figure(figsize=(2 * column, height), dpi=DPI)
    write(figure, title, height)
    for i, pair in enumerate(matched):
        bottom = height - TOP - (i // 2 + 1) * (side + CAPTION + GAP) + GAP
        left = i % 2 / 2 + GAP / column / 2
        axes = figure.add_axes((left, bottom / height, 0.5 - GAP / column, side / height))
        join(axes, pair, round(len(pair.one) * GAP / side))
    figure.savefig(path)
    return path


def join(axes: Any, pair: Pair, gap: int) -> None:
    white = np.ones((len(pair.one), gap, 3), np.float32)
    fill(axes, Tile(np.concatenate([pair.one, white, pair.other], 1), pair.title))
    shift = pair.one.shape[1] + gap
    for k, (x, y, u, v) in enumerate(pair.ends):
        colour = YELLOW if pair.right is None else GREEN if pair.right[k] else RED
        axes.plot([x, u + shift], [y, v], "-o", color=colour, linewidth=1.3, markersize=3.5)


def write(figure: Any, title: str, height: float) -> None:
    figure.text(0.01, 1 - 0.12 / height, title, fontsize=9, color=INK, va="top", wrap=True)
