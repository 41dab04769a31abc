"""Draw images beside their true and predicted classes, and write the scores of each of the K classes to a table."""

import colorsys
import csv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eagleray.base.plotting import DPI
from eagleray.dense.segmentation.data import IGNORED
from eagleray.dense.segmentation.scores import class_scores

GOLDEN = 0.618034  # difference of hue between successive classes, as a share of the colour circle (golden ratio)
NONE = (32, 32, 32)  # colour of pixels without a class
WIDTH = 3.2  # width of an image in inches
NAMES = 40  # largest number of names in a legend


class Comparison(NamedTuple):
    """An image with its true and its predicted classes."""

    image: Tensor  # (3, H, W) uint8
    truth: Tensor  # (H, W) true classes; IGNORED: no class
    prediction: Tensor  # (H, W) predicted classes


def colours(classes: int) -> NDArray[np.uint8]:
    """Return a table of colours (256, 3): row c is the colour of class c.

    The rows from `classes` on have the colour of pixels without a class."""
    out = np.full((256, 3), NONE, np.uint8)
    for i in range(classes):
        r, g, b = colorsys.hsv_to_rgb(i * GOLDEN % 1, (0.75, 0.45)[i % 2], (0.95, 0.75, 0.55)[i % 3])
        out[i] = round(255 * r), round(255 * g), round(255 * b)
    return out


def draw(path: Path, samples: Sequence[Comparison], classes: Sequence[str]) -> None:
    """Draw a row for each image: image, true classes and predicted classes. A legend names the classes that occur."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    paint = colours(len(classes))
    high = max(s.image.shape[1] / s.image.shape[2] for s in samples) * WIDTH
    values = torch.cat([x.flatten() for s in samples for x in (s.truth, s.prediction)]).unique().tolist()
    known = [c for c in values if c != IGNORED][:NAMES]
    handles = [Patch(color=paint[c] / 255, label=classes[c]) for c in known]
    if IGNORED in values:
        handles.append(Patch(color=paint[IGNORED] / 255, label="not counted"))
    columns = 6
    legend = 0.3 + 0.22 * -(-len(handles) // columns)
    figure = Figure(figsize=(3 * WIDTH, high * len(samples) + legend + 0.3), dpi=DPI, layout="constrained")
    below = legend / figure.get_figheight()
    figure.set_layout_engine("constrained", rect=(0, below, 1, 1 - below))
    axes = figure.subplots(len(samples), 3, squeeze=False)
    for row, s in zip(axes, samples, strict=True):
        row[0].imshow(s.image.permute(1, 2, 0).numpy())
        row[1].imshow(paint[s.truth.numpy()])
        row[2].imshow(paint[np.where(s.truth == IGNORED, IGNORED, s.prediction)])
        for cell in row:
            cell.set_axis_off()
    for cell, title in zip(axes[0], ("image", "truth", "prediction"), strict=True):
        cell.set_title(title, fontsize=10)
    figure.legend(handles=handles, loc="lower center", ncols=columns, frameon=False, fontsize=8)
    figure.savefig(path)


def table(path: Path, classes: Sequence[str], counts: Tensor) -> None:
    """Write a CSV file with a row for each class: IoU and accuracy in percent, and the number of pixels.

    `counts` (K, K) is a confusion matrix. The scores of a class without pixels are empty."""
    iou, accuracy = class_scores(counts)
    with path.open("w", newline="") as f:
        writer = csv.writer(f)
        writer.writerow(["class", "iou", "accuracy", "pixels"])
        for name, i, a, n in zip(classes, iou.tolist(), accuracy.tolist(), counts.sum(1).tolist(), strict=True):
            writer.writerow([name, *("" if np.isnan(v) else f"{100 * v:.2f}" for v in (i, a)), n])
