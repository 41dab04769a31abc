"""What the suite is measured by."""

import numpy as np
import pytest

from eagleray.base.errors import UserError
from eagleray.protocols.classification_scores import average_precision, map11, mean_per_class, roc_auc, top1


def test_top1_and_its_mean_over_classes():
    scores = np.eye(3)[[0, 0, 0, 1, 2, 2]]
    y = np.array([0, 0, 1, 1, 1, 2])
    assert top1(scores, y) == pytest.approx(100 * 4 / 6)
    assert mean_per_class(scores, y) == pytest.approx(100 * (1 + 1 / 3 + 1) / 3)
    more = np.r_[np.arange(6), [0] * 50]  # a class with more samples of the same kind weighs no more
    assert mean_per_class(scores[more], y[more]) == pytest.approx(mean_per_class(scores, y))


def test_a_class_that_no_sample_has_is_no_part_of_the_mean():
    assert mean_per_class(np.eye(5)[[0, 3]], np.array([0, 3])) == 100


def eleven_points(scores: np.ndarray, there: np.ndarray) -> float:
    """Word by word: of every prefix of the ranking its precision and recall."""
    hits = there[np.argsort(-scores)].astype(int).cumsum()
    precision, recall = hits / np.arange(1, len(hits) + 1), hits * 10 / there.sum()
    return float(np.mean([max(p for p, r in zip(precision, recall, strict=True) if r >= t) for t in range(11)]))


def test_eleven_points_are_those_of_the_definition():
    g = np.random.default_rng(0)
    for _ in range(50):
        scores, there = g.permutation(40) * 1.0, g.random(40) < g.uniform(0.1, 0.9)
        there[0] = True
        assert average_precision(scores, there.astype(int)) == pytest.approx(eleven_points(scores, there))


def test_average_precision_by_hand():
    ranking = np.array([1, 0, 1, 0])  # precisions 1 up to recall 0.5, 2/3 above
    assert average_precision(-np.arange(4.0), ranking) == pytest.approx((6 * 1 + 5 * 2 / 3) / 11)
    assert average_precision(-np.arange(4.0), np.array([0, 0, 0, 1])) == pytest.approx(1 / 4), "not 1 at recall 0"


def test_what_is_hard_to_tell_counts_as_neither():
    g = np.random.default_rng(1)
    scores, marks = g.normal(size=60), g.integers(0, 2, 60)
    hard = np.r_[marks, [-1] * 20]
    assert average_precision(np.r_[scores, g.normal(size=20)], hard) == average_precision(scores, marks)


def test_rankings_are_all_that_matters():
    g = np.random.default_rng(2)
    scores, marks = g.normal(size=(80, 3)), g.integers(0, 2, (80, 3))
    assert map11(np.exp(scores), marks) == pytest.approx(map11(scores, marks))
    assert map11(marks * 1.0, marks) == pytest.approx(100)
    y = marks[:, 0]
    assert roc_auc(scores, y) == pytest.approx(100 - roc_auc(-scores, y))
    two = scores[:, :2]
    above = (two[y == 1, 1] - two[y == 1, 0])[:, None] > (two[y == 0, 1] - two[y == 0, 0])[None]
    assert roc_auc(two, y) == pytest.approx(100 * above.mean()), "the share of pairs in order"
    with pytest.raises(UserError, match="expected test images of two classes, not 1"):
        roc_auc(two, np.zeros(80, int))
