"""What the results on the suite of 18 sets are measured by: EsViT, Li et al. 2021, arXiv:2106.09785, table 10."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import precision_recall_curve, roc_auc_score

from eagleray.base.errors import UserError

Array = NDArray[Any]
POINTS = np.linspace(0, 1, 11)


def top1(scores: Array, y: Array) -> float:
    """Percent of n samples whose class y (n,) has the highest of their scores (n, C)."""
    return 100 * float((scores.argmax(1) == y).mean())


def mean_per_class(scores: Array, y: Array) -> float:
    """Top-1 of each class's samples, and the mean of the classes that have any."""
    right = scores.argmax(1) == y
    return 100 * float(np.mean([right[y == c].mean() for c in np.unique(y)]))


def roc_auc(scores: Array, y: Array) -> float:
    """Percent of the pairs of a sample of class 1 and one of class 0, (n, 2) scores and (n,) classes, that the
    difference of the scores puts in order. Raises UserError for samples of another number of classes."""
    if len(np.unique(y)) != 2:
        raise UserError(f"roc_auc: expected images of two classes to test on, found {len(np.unique(y))}")
    return 100 * float(roc_auc_score(y == 1, scores[:, 1] - scores[:, 0]))


def map11(scores: Array, marks: Array) -> float:
    """Mean over classes of the 11-point average precision of VOC 2007, in percent: scores (n, C), marks (n, C) of 1, 0
    and -1, which counts as neither. Classes that no sample has are left out."""
    there = np.flatnonzero((marks == 1).any(0))
    return 100 * float(np.mean([average_precision(scores[:, c], marks[:, c]) for c in there]))


def average_precision(scores: Array, marks: Array) -> float:
    """Everingham et al. 2010, equations 1 and 2: the mean, over recalls of 0, 0.1 to 1, of the highest precision at
    that recall or above, as a share."""
    kept = marks >= 0
    precision, recall, _ = precision_recall_curve(marks[kept], scores[kept])
    precision, recall = precision[:-1], recall[:-1]  # the last point, precision 1 at recall 0, is no ranking's
    # A recall of 3 / 10 must reach the point 0.3, which the eleven points of NumPy are only nearly.
    return float(np.mean([precision[recall >= r - 1e-9].max() for r in POINTS]))


METRICS: Mapping[str, Callable[[Array, Array], float]] = {f.__name__: f for f in (top1, mean_per_class, map11, roc_auc)}
