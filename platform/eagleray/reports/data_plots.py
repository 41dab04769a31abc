"""Draw the pictures of a page on a data set: a map of features with images on it, histograms, contact sheets."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from eagleray.base.plotting import BLUE, LIGHT
from eagleray.datasets.contact_sheet import sheet
from eagleray.datasets.stats import fit_within
from eagleray.reports.page import uri

Pixels = NDArray[np.uint8]  # (H, W, 3)
Floats = NDArray[np.floating[Any]]
SIZE = (9.6, 7.2)  # width and height of the map in inches
SMALL = (4.6, 1.5)  # width and height of a histogram in inches
ON_MAP = 34  # longer side of an image on the map, in pixels
QUALITY = 80  # quality of WebP files, from 0 to 100


def images_uri(images: Sequence[Pixels], columns: int = 4) -> str:
    """Return a contact sheet of images as a data: URI."""
    sheet(images, columns).save(buffer := io.BytesIO(), "WEBP", quality=QUALITY)
    return uri(buffer.getvalue(), "webp")


def map_uri(x: Floats, y: Floats, colour: NDArray[np.int64], images: Sequence[tuple[int, Pixels]]) -> str:
    """Return a scatter plot of n points as a data: URI. `x` and `y` (n,) are their coordinates, and the integers
    `colour` (n,) select their colours. `images` are pairs of the index of a point and the image that is drawn there."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.offsetbox import AnnotationBbox, OffsetImage

    figure = Figure(figsize=SIZE, dpi=110)
    axes = figure.add_axes((0, 0, 1, 1))
    x, y = (v.clip(*np.percentile(v, [0.5, 99.5])) for v in (x, y))  # a few outliers would squeeze all other points
    colours = colormaps["tab20"](colour % 20)
    axes.scatter(x, y, c=colours, s=8, linewidths=0, alpha=0.7)
    for row, image in images:
        small = np.asarray(Image.fromarray(image).resize(fit_within(image.shape[1], image.shape[0], 2 * ON_MAP)))
        thumb = OffsetImage(small, zoom=0.5)
        edge = {"edgecolor": colours[row], "linewidth": 2}
        axes.add_artist(AnnotationBbox(thumb, (x[row], y[row]), pad=0, bboxprops=edge))
    axes.margins(0.05)
    axes.set_axis_off()
    return _saved(figure)


def histogram_uri(values: Floats) -> str:
    """Return a histogram of `values` as a data: URI. The first and the last bar also count values beyond the axis."""
    from matplotlib.figure import Figure

    low, high = np.percentile(values, [0.5, 99.5])
    figure = Figure(figsize=SMALL, dpi=150, layout="constrained")
    axes = figure.subplots()
    high = high if high > low else low + 1
    axes.hist(values.clip(low, high), bins=60, color=BLUE, weights=np.full(len(values), 100 / len(values)))
    axes.set_ylabel("images, %", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(axis="y", color=LIGHT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    return _saved(figure)


def _saved(figure: Any) -> str:
    figure.savefig(buffer := io.BytesIO(), format="png")
    return uri(buffer.getvalue(), "png")


def principal(features: Floats) -> Floats:
    """Return the coordinates (n, 2) of features (n, D) on their first two principal components."""
    centred = features - features.mean(0)
    _, _, axes = np.linalg.svd(centred, full_matrices=False)
    return centred @ np.vstack([axes, np.zeros_like(axes)])[:2].T
