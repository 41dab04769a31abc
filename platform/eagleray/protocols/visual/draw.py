"""Draw the pictures of evaluations: sheets of images, and pairs of images with lines between matching patches."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from eagleray.base.plotting import BLUE, DPI, INK

Pixels = NDArray[np.float32]  # (H, W, 3) from 0 to 1

# In inches: the height of a tile, the width of a row's label, the gap between tiles, and the height of the title.
SIDE, LABEL, GAP, TOP = 1.55, 0.95, 0.08, 0.5
CAPTION = 0.2  # inches above each tile
LONGEST = 480  # largest side of a tile in pixels, so that files stay small
RED, GREEN, YELLOW = "#d5402b", "#2f8f4e", "#f2c200"
# Colours (6, 3) of objects in videos; colour-blind people can tell them apart. Row i is the colour of object i + 1.
COLOURS = np.array([(230, 97, 0), (26, 133, 255), (212, 17, 89), (254, 204, 2), (93, 58, 155), (64, 176, 166)]) / 255
OVER = 0.6  # opacity of a heat map or a mask that is blended over an image


class Tile(NamedTuple):
    """An image with a title, marked points and the outline of a mask.

    The points (x, y) are fractions of the image's width and height."""

    image: Pixels
    title: str = ""
    points: Sequence[tuple[float, float]] = ()
    outline: NDArray[np.bool_] | None = None  # (H, W) mask of the image's size, whose outline is drawn
    edge: str = ""  # colour of a frame around the image; empty: no frame


class Pair(NamedTuple):
    """Two images of the same height, with k pairs of matched points, and whether each of these matches is right."""

    one: Pixels
    other: Pixels
    ends: NDArray[np.float64]  # (k, 4) pixels: x and y in `one`, then x and y in `other`
    right: NDArray[np.bool_] | None  # (k,) whether each match is right; None: unknown
    title: str
    # (2, 4) pixels. Row 0 is for the global feature of `one`, row 1 for that of `other`: x and y of the region in
    # `one` that is nearest to this feature, then of the region in `other`.
    marks: NDArray[np.float64] | None = None


def pixels(image: Tensor) -> Pixels:
    """Convert an image (3, H, W), uint8, to pixels (H, W, 3) from 0 to 1."""
    return np.divide(image.permute(1, 2, 0).cpu().numpy(), 255, dtype=np.float32)


def heat_overlay(image: Tensor, heat: Tensor) -> Pixels:
    """Blend an image (3, H, W) with a heat map (h, w) of values from 0 on. The largest value is the brightest."""
    from matplotlib import colormaps

    large = enlarge(heat / heat.max().clamp(min=1e-12), image)
    return (1 - OVER) * pixels(image) + OVER * colormaps["inferno"](large)[..., :3].astype(np.float32)


def colour_overlay(image: Tensor, colours: Tensor) -> Pixels:
    """Enlarge colours (h, w, 3), one for each patch, to the size of an image (3, H, W)."""
    return np.stack([enlarge(c, image) for c in colours.unbind(-1)], -1)


def darken(image: Tensor, mask: Tensor) -> Pixels:
    """Darken the patches of an image (3, H, W) that a mask (h, w) does not select."""
    return pixels(image) * (0.15 + 0.85 * enlarge(mask.float(), image)[..., None])


def enlarge(grid: Tensor, image: Tensor) -> NDArray[np.float32]:
    """Enlarge a map (h, w) to the size of an image (3, H, W) without interpolation."""
    return F.interpolate(grid[None, None].float(), image.shape[1:])[0, 0].cpu().numpy()


def paint_objects(image: Tensor, mask: NDArray[np.uint8]) -> Pixels:
    """Blend an image (3, H, W) with the colours of its objects. `mask` (H, W) has the number of each pixel's object."""
    out = pixels(image)
    on = mask > 0
    out[on] = (1 - OVER) * out[on] + OVER * COLOURS[(mask[on] - 1) % len(COLOURS)]
    return out


def sheet(rows: Mapping[str, Sequence[Tile]], path: Path, title: str) -> Path:
    """Draw rows of tiles of the same height into the file `path`, each row to the right of its label, the key in
    `rows`."""
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
    """Draw a tile into matplotlib axes."""
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


def pairs(pairs: Sequence[Pair], path: Path, title: str, *, side: float = 1.6 * SIDE) -> Path:
    """Draw pairs of images, `side` inches high, into a file, two pairs in a row, with numbered lines between matches.

    A line is green if the match is right, red if it is wrong and yellow if this is unknown. In each image, a blue dot
    marks the region nearest to its own global feature, and a red triangle the region nearest to the other image's
    global feature (EsViT, figures 5 and 9)."""
    from matplotlib.figure import Figure

    columns = min(len(pairs), 2)
    rows = -(-len(pairs) // columns)
    height = TOP + rows * (side + CAPTION + GAP)
    column = max((p.one.shape[1] + p.other.shape[1]) / p.one.shape[0] for p in pairs) * side + 4 * GAP
    figure = Figure(figsize=(columns * column, height), dpi=DPI)
    write(figure, title, height)
    for i, pair in enumerate(pairs):
        bottom = height - TOP - (i // columns + 1) * (side + CAPTION + GAP) + GAP
        left = (i % columns + GAP / column) / columns
        axes = figure.add_axes((left, bottom / height, (1 - 2 * GAP / column) / columns, side / height))
        join(axes, pair, round(len(pair.one) * GAP / side))
    figure.savefig(path)
    return path


def join(axes: Any, pair: Pair, gap: int) -> None:
    """Draw a pair of images, `gap` pixels apart, and the lines between their matching points into matplotlib axes."""
    from matplotlib.patheffects import withStroke

    white = np.ones((len(pair.one), gap, 3), np.float32)
    fill(axes, Tile(np.concatenate([pair.one, white, pair.other], 1), pair.title))
    shift = pair.one.shape[1] + gap
    for k, (x, y, u, v) in enumerate(pair.ends):
        colour = YELLOW if pair.right is None else GREEN if pair.right[k] else RED
        axes.plot([x, u + shift], [y, v], "-o", color=colour, linewidth=1.3, markersize=3.5)
        for at, low in ((x, y), (u + shift, v)):
            text = axes.annotate(str(k + 1), (at, low), (3, 2), textcoords="offset points", fontsize=7, color="white")
            text.set_path_effects([withStroke(linewidth=1.8, foreground=INK)])
    if pair.marks is not None:
        own, theirs = ("o", BLUE, 11, 3), ("^", RED, 7, 4)  # both are seen: the smaller triangle is over the dot
        for (x, y, u, v), (first, second) in zip(pair.marks, ((own, theirs), (theirs, own)), strict=True):
            for at, low, (marker, colour, large, above) in ((x, y, first), (u + shift, v, second)):
                edge: dict[str, Any] = {"markeredgecolor": "white", "markeredgewidth": 1.2, "clip_on": False}
                axes.plot(at, low, marker, color=colour, markersize=large, zorder=above, **edge)


def write(figure: Any, title: str, height: float) -> None:
    """Write a title at the top of a figure, whose height is in inches."""
    figure.text(0.01, 1 - 0.12 / height, title, fontsize=9, color=INK, va="top", wrap=True)
