"""Compute the metrics of EsViT's suite of 18 datasets: Li et al. 2021, arXiv:2106.09785, table 10."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import precision_recall_curve, roc_auc_score

from eagleray.base.errors import UserError

Array = NDArray[Any]
POINTS = np.linspace(0, 1, 11)


def top1(scores: Array, y: Array) -> float:
    """Return the percentage of samples whose class y (n,) has the highest score in scores (n, C)."""
    return 100 * float((scores.argmax(1) == y).mean())


def mean_per_class(scores: Array, y: Array) -> float:
    """Return the mean of the accuracies of all classes in percent. Classes without samples are left out."""
    right = scores.argmax(1) == y
    return 100 * float(np.mean([right[y == c].mean() for c in np.unique(y)]))


def roc_auc(scores: Array, y: Array) -> float:
    """Return the area under the ROC curve in percent, for scores (n, 2) of the classes 0 and 1 and for classes y (n,).

    This is the share of the pairs of one sample of each class in which the sample of class 1 has the larger margin: its
    score for class 1 minus that for class 0.

    Raises UserError when the samples do not belong to exactly two classes."""
    if len(np.unique(y)) != 2:
        raise UserError(f"roc_auc: expected test images of two classes, not {len(np.unique(y))}")
    return 100 * float(roc_auc_score(y == 1, scores[:, 1] - scores[:, 0]))


def map11(scores: Array, marks: Array) -> float:
    """Return VOC 2007's 11-point average precision in percent, as a mean over classes, for scores and marks (n, C).

    A mark is 1 if the sample has the class, 0 if not, and -1 if the sample does not count for this class. Classes
    without samples are left out."""
    classes = np.flatnonzero((marks == 1).any(0))
    return 100 * float(np.mean([average_precision(scores[:, c], marks[:, c]) for c in classes]))


def average_precision(scores: Array, marks: Array) -> float:
    """Return the 11-point average precision of one class, from 0 to 1 (Everingham et al. 2010, equations 1 and 2).

    It is the mean over the recalls r = 0, 0.1, ..., 1 of the highest precision at any recall of at least r."""
    counted = marks >= 0
    precision, recall, _ = precision_recall_curve(marks[counted], scores[counted])
    precision, recall = precision[:-1], recall[:-1]  # drops scikit-learn's last point: precision 1, recall 0
    # 1e-9 absorbs rounding: a recall of 3 / 10 must reach the point 0.3, which is 0.30000000000000004 in np.linspace.
    return float(np.mean([precision[recall >= r - 1e-9].max() for r in POINTS]))


METRICS: Mapping[str, Callable[[Array, Array], float]] = {f.__name__: f for f in (top1, mean_per_class, map11, roc_auc)}
