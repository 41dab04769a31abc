"""Draw a set of images: a contact sheet, and histograms of the sizes and aspect ratios."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from eagleray.base.plotting import BLUE, INK, LIGHT
from eagleray.datasets.stats import ASPECTS, SIDES, ImageStats, fit_within

TILE, GAP, COLUMNS = 144, 6, 8  # pixels on a tile's side, pixels between tiles, tiles in a row
SOURCE = "Source"  # key of the text in a PNG file that names the data
PAPER = (250, 250, 248)


def sheet(images: Sequence[NDArray[np.uint8]], columns: int = COLUMNS) -> Image.Image:
    """Return a picture of images (H, W, 3) in rows, each image uncropped and centred on a square tile."""
    rows = -(-len(images) // columns)
    step = TILE + GAP
    picture = Image.new("RGB", (columns * step + GAP, rows * step + GAP), PAPER)
    for i, image in enumerate(images):
        tile = Image.fromarray(image).resize(fit_within(image.shape[1], image.shape[0], TILE), Image.Resampling.LANCZOS)
        x, y = GAP + i % columns * step, GAP + i // columns * step
        picture.paste(tile, (x + (TILE - tile.width) // 2, y + (TILE - tile.height) // 2))
    return picture


def sizes(stats: ImageStats, path: Path, source: str = "") -> None:
    """Draw histograms of the shorter side and of width / height into a PNG file, which stores `source` as text.

    The bins are logarithmic. The outermost bins also count everything beyond them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.8), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2)
    _histogram(left, stats.sides, SIDES, {s: str(s) for s in (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)})
    left.set(title="Shorter side", xlabel="pixels", ylabel="images, %")
    ratios = {1 / 4: "1:4", 1 / 2: "1:2", 2 / 3: "2:3", 1: "1:1", 3 / 2: "3:2", 2: "2:1", 4: "4:1"}
    _histogram(right, stats.aspects, ASPECTS, ratios)
    right.set(title="Shape", xlabel="width : height")
    figure.savefig(path, metadata={SOURCE: source})


def source_of(path: Path) -> str | None:
    """Return the `source` that `sizes` stored in a picture; "" if it has none, None if there is no file."""
    if not path.exists():
        return None
    with contextlib.suppress(OSError), Image.open(path) as picture:
        return str(picture.info.get(SOURCE, ""))
    return ""


def _histogram(axes: Any, counts: Sequence[int], edges: Sequence[float], ticks: dict[float, str]) -> None:
    positions = np.log2(edges)
    step = positions[1] - positions[0]
    shares = 100 * np.array(counts) / max(sum(counts), 1)
    nonzero = np.flatnonzero(counts)
    first, last = int(nonzero[0]), int(nonzero[-1])
    lefts = np.r_[positions[0] - step, positions]
    axes.bar(lefts[first : last + 1], shares[first : last + 1], width=step * 0.92, align="edge", color=BLUE)
    axes.set_xlim(lefts[max(first - 1, 0)], lefts[last] + 2 * step)
    visible = {
        np.log2(t): name for t, name in ticks.items() if lefts[first] - step <= np.log2(t) <= lefts[last] + 2 * step
    }
    axes.set_xticks(list(visible), list(visible.values()))
    axes.set_axisbelow(True)
    axes.grid(axis="y", color=LIGHT, linewidth=0.8)
    axes.tick_params(length=0, labelcolor=INK)
    axes.spines[["top", "right", "left"]].set_visible(False)
