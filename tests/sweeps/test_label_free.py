"""The number without labels is higher for better features, and its agreement with kNN is that of ranks."""

import math
from typing import Any

import pytest

from eagleray.sweeps.label_free import ALIGNMENT, LABEL_FREE, RANK, UNIFORMITY, agreement, objective, score, spearman


def numbers(rank: float, alignment: float, uniformity: float, knn: float | None = None) -> dict[str, float]:
    given = {RANK: rank, ALIGNMENT: alignment, UNIFORMITY: uniformity}
    return given | ({} if knn is None else {"knn/top1": knn, "monitor/knn": 1.0})


def finished(n: dict[str, float], state: str = "finished") -> dict[str, Any]:
    return {"state": state, "numbers": n}


def test_better_features_have_a_higher_number():
    usual = score(numbers(40, 0.6, -2.0))
    assert score(numbers(60, 0.6, -2.0)) > usual, "more directions are used"
    assert score(numbers(40, 0.6, -2.5)) > usual, "images are spread more evenly"
    assert score(numbers(1, 0.0, 0.0)) < usual, "all features are equal"
    assert math.isnan(score({RANK: 40.0}))
    assert objective(numbers(40, 0.6, -2.0), LABEL_FREE) == usual
    assert objective(numbers(40, 0.6, -2.0), RANK) == 40


def test_correlation_is_that_of_ranks():
    assert spearman([1, 2, 3, 4], [1, 10, 100, 1000]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [9, 8, 7, -6]) == pytest.approx(-1)
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9487, abs=1e-4)  # SciPy's spearmanr
    assert spearman([1, 1, 1], [1, 2, 3]) == 0


def test_agreement_is_over_finished_trials_that_have_both():
    rows = [finished(numbers(10 * n, 0.5, -2.0, knn=30 + n)) for n in range(1, 6)]
    rows += [finished(numbers(1, 0.5, -2.0, knn=99), "stopped"), finished({"knn/top1": 98.0}), {"state": "finished"}]
    agreed = agreement(rows)
    assert agreed is not None
    assert (agreed.reference, agreed.trials) == ("knn/top1", 5)
    assert agreed.correlations == pytest.approx({LABEL_FREE: 1, RANK: 1, ALIGNMENT: 0, UNIFORMITY: 0})
    assert agreed.line().startswith("rank correlation with knn/top1 over 5 finished trials: label_free +1.00, ")
    assert agreement(rows[:3]) is None
    assert agreement([finished(numbers(10 * n, 0.5, -2.0)) for n in range(1, 6)]) is None, "no labels"
