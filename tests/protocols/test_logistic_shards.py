"""Logistic regression on features that ranks share gives what scikit-learn gives in one process."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.features import clusters
from helpers.ranks import on_ranks

from eagleray.base import dist
from eagleray.base.errors import UserError
from eagleray.protocols import logistic as protocol
from eagleray.protocols import logistic_shards
from eagleray.protocols.features import LabelledFeatures
from eagleray.protocols.logistic import Problem, logistic, probe


def share(whole: LabelledFeatures) -> LabelledFeatures:
    """This rank's rows: the second of three ranks has a single one, of which none is held out."""
    at = [0, *(len(whole.x) * 3 // 4 + i for i in range(dist.size() - 1)), len(whole.x)]
    first, last = sorted(at)[dist.rank() : dist.rank() + 2]
    return LabelledFeatures(whole.x[first:last], whole.y[first:last])


def sets() -> tuple[LabelledFeatures, LabelledFeatures]:
    """Features of five classes, numbered 0, 10, 20 and so on, in the order of the classes."""
    train, test = clusters(300, spread=2.0, seed=0), clusters(200, spread=2.0, seed=1)
    order = train.y.argsort(stable=True)
    return LabelledFeatures(train.x[order], 10 * train.y[order]), LabelledFeatures(test.x, 10 * test.y)


def marked() -> tuple[LabelledFeatures, LabelledFeatures]:
    """The same with marks of three classes; some do not count."""
    out = []
    for s in sets():
        marks = torch.stack([(s.y >= 10 * c).long() for c in (1, 2, 3)], 1)
        marks[::7, 1] = -1
        out.append(LabelledFeatures(s.x, marks))
    return out[0], out[1]


def two() -> tuple[LabelledFeatures, LabelledFeatures]:
    a, b = (LabelledFeatures(s.x[s.y < 20], s.y[s.y < 20]) for s in sets())
    return a, b


def measure() -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, (train, test) in {"top1": sets(), "mean_per_class": sets(), "roc_auc": two(), "map11": marked()}.items():
        found = probe(share(train), None, share(test), metric=name, seed=0, note=lambda _: None)
        out[name] = dict(found.numbers), {k: v for k, v in found.settings.items() if k != "iterations"}
    return out


@pytest.mark.slow
def test_ranks_find_what_one_process_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logistic_shards, "ROWS", 50)
    monkeypatch.setattr(protocol, "ITERATIONS", 30)  # fits that are ended early are equal too
    one = measure()
    for part in on_ranks(3, measure, tmp_path, start="fork"):
        for name, (numbers, settings) in part.items():
            assert numbers == pytest.approx(one[name][0]), name
            assert settings == one[name][1]
    assert 40 < one["top1"][0]["logistic/top1"] < 100


def fitted(strength: float, binary: bool) -> tuple[np.ndarray, np.ndarray, int]:
    train = share((two() if binary else sets())[0])
    y = train.y.numpy() // 10
    [model] = Problem(train.x.double().numpy(), y, 5).fit(strength).models
    return model.coef_, model.intercept_, int(model.n_iter_.max())


def fits(binary: bool) -> list[tuple[np.ndarray, np.ndarray, int]]:
    return [fitted(strength, binary) for strength in (1e-2, 1.0, 100.0)]


@pytest.mark.parametrize("binary", [False, True])
def test_the_weights_and_iterations_are_scikit_learns(tmp_path: Path, binary: bool):
    for part in on_ranks(2, fits, tmp_path, binary):
        for (weight, bias, iterations), expected in zip(part, fits(binary), strict=True):
            np.testing.assert_allclose(weight, expected[0], rtol=1e-4, atol=1e-6)
            np.testing.assert_allclose(bias, expected[1], rtol=1e-4, atol=1e-6)
            assert iterations == expected[2]


def unknown() -> str:
    train, test = sets()
    test.y[-1] = 7  # of the last rank
    try:
        logistic(share(train), share(test))
    except UserError as e:
        return str(e)
    return ""


def test_a_label_that_only_one_rank_does_not_know_is_refused_by_all(tmp_path: Path):
    assert on_ranks(2, unknown, tmp_path) == ["logistic: the test set has label 7, which no training image has"] * 2
