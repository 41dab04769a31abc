"""The search for lambda, and the classifier that is fitted with it."""

import functools
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_breast_cancer, load_digits, load_wine

from eagleray.base.errors import UserError
from eagleray.protocols.catalogue import Logistic
from eagleray.protocols.features import LabelledFeatures
from eagleray.protocols.logistic import (
    ONE_IN,
    STEPS,
    Problem,
    logistic,
    probe,
    search,
    strength,
    validation_rows,
    validation_score,
)


def clusters(n: int, *, spread: float, seed: int) -> LabelledFeatures:
    """Five gaussian classes in 16 dimensions."""
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(5, 16, generator=torch.Generator().manual_seed(9))
    y = torch.arange(n) % 5
    return LabelledFeatures(centres[y] + spread * torch.randn(n, 16, generator=g), y)


def test_the_search_finds_any_single_peak_as_a_sweep_does():
    g = np.random.default_rng(0)
    for peak in range(STEPS + 1):
        rise, fall = np.sort(g.random(peak + 1)), np.sort(g.random(STEPS - peak))[::-1]
        scores = np.r_[rise, fall * rise[-1]]
        looked: list[int] = []
        found = search(lambda step: (looked.append(step), (float(scores[step]),))[1])  # noqa: B023
        assert found == scores.argmax() == peak
        assert len(looked) == len(set(looked)) <= 15
        assert looked[:7] == [0, 16, 32, 48, 64, 80, 96]


def test_96_steps_of_an_eighth_of_a_decade():
    assert [strength(s) for s in (0, 8, 48, 96)] == [1e-6, 1e-5, 1, 1e6]
    assert strength(49) / strength(48) == pytest.approx(10 ** (1 / 8))


@pytest.mark.parametrize("lam", [1.0, 10.0, 100.0])
def test_the_classifier_minimises_the_sum_of_the_losses_and_half_lambda_w_squared(lam: float):
    """So the gradient of the losses is -lambda w; of their mean, lambda would be 400 times smaller."""
    x, y = (t.double() if t.is_floating_point() else t for t in clusters(400, spread=2.0, seed=0))
    [model] = Problem(x.numpy(), y.numpy(), 5).fit(lam).models
    w = torch.tensor(model.coef_, requires_grad=True)
    z = x @ w.T + torch.tensor(model.intercept_)
    torch.nn.functional.cross_entropy(z, y, reduction="sum").backward()
    assert w.grad is not None
    assert (w.grad + lam * w.detach()).norm() < 0.1 * lam * w.detach().norm()  # L-BFGS ends when it is near


def test_classes_that_are_apart_are_told_apart_and_noise_is_not():
    sets = [clusters(n, spread=0.1, seed=s) for s, n in enumerate((500, 100))]
    assert logistic(*sets).numbers["logistic/top1"] == 100
    noise = logistic(*(clusters(n, spread=100.0, seed=s) for s, n in enumerate((500, 1000))))
    assert 10 < noise.numbers["logistic/top1"] < 30


def test_lambda_is_found_without_the_test_set():
    train, test = clusters(500, spread=2.0, seed=0), clusters(200, spread=2.0, seed=1)
    flipped = LabelledFeatures(test.x, (test.y + 1) % 5)
    one, other = logistic(train, test), logistic(train, flipped)
    assert one.numbers["logistic/lambda"] == other.numbers["logistic/lambda"]
    assert one.numbers["logistic/top1"] > other.numbers["logistic/top1"]


def test_a_given_validation_set_finds_lambda_and_is_learnt_from_at_the_end():
    train, val, test = (clusters(n, spread=0.1, seed=s) for s, n in enumerate((200, 100, 100)))
    few = LabelledFeatures(train.x[train.y < 4], train.y[train.y < 4])
    found = probe(few, val, test, metric="top1", seed=0, note=str)
    assert found.numbers["logistic/top1"] == 100, "class 4 is in the validation set alone"
    assert found.settings["validation"] == "100 images, given"
    assert found.settings["images"] == [260, 100]


def test_labels_may_be_any_numbers():
    train, test = clusters(200, spread=2.0, seed=0), clusters(100, spread=2.0, seed=1)
    named = [LabelledFeatures(s.x, s.y * 1000 + 7) for s in (train, test)]
    assert logistic(*named).numbers == logistic(train, test).numbers


def test_every_fifth_of_a_class_is_held_out():
    y = np.repeat([3, 0, 7], [50, 4, 9])
    held = validation_rows(y, 0)
    assert [int(held[y == c].sum()) for c in (3, 0, 7)] == [10, 0, 1]
    assert (held == validation_rows(y, 0)).all()
    assert (held != validation_rows(y, 1)).any()


def test_of_two_classes_the_probabilities_add_up():
    train = clusters(200, spread=3.0, seed=0)
    two = Problem(train.x.numpy(), (train.y.numpy() == 0).astype(int), 2).fit(1.0)
    assert np.exp(two.scores(train.x.numpy())).sum(1) == pytest.approx(np.ones(200))
    assert two.scores(train.x.numpy()).argmax(1) == pytest.approx(two.models[0].predict(train.x.numpy()))


def test_several_classes_of_an_image_each_have_a_classifier():
    g = torch.Generator().manual_seed(0)
    marks = torch.randint(0, 2, (400, 4), generator=g)
    x = marks.float() @ torch.randn(4, 12, generator=g) + 0.3 * torch.randn(400, 12, generator=g)
    sets = LabelledFeatures(x[:300], marks[:300].clone()), LabelledFeatures(x[300:], marks[300:])

    def score() -> float:
        return probe(sets[0], None, sets[1], metric="map11", seed=0, note=str).numbers["logistic/map11"]

    assert score() > 95
    sets[0].y[::3] = 1 - marks[:300:3]
    wrong = score()
    sets[0].y[::3] = -1
    assert wrong < score(), "what is hard to tell is not learnt"


def test_without_a_validation_set_the_last_fit_takes_the_features_as_they_are(monkeypatch: pytest.MonkeyPatch):
    """Those of the search are copies, which are freed before it."""
    train, test = clusters(200, spread=1.0, seed=0), clusters(50, spread=1.0, seed=1)
    fit, seen, alive, shared = Problem.fit, list[Any](), list[int](), list[bool]()

    def counted(self: Problem, strength: float) -> Any:
        alive.append(len({id(x) for one in seen if (x := one()) is not None}))
        seen.append(weakref.ref(self.x))
        shared.append(np.shares_memory(self.x, train.x.numpy()))
        return fit(self, strength)

    monkeypatch.setattr(Problem, "fit", counted)
    logistic(train, test)
    assert alive == [0] + [1] * (len(seen) - 2) + [0]
    assert shared == [False] * (len(seen) - 1) + [True]


def test_labels_that_do_not_match_are_one_line():
    train, test = clusters(100, spread=1.0, seed=0), clusters(20, spread=1.0, seed=1)
    with pytest.raises(UserError, match="test set has label 5, which no training image has"):
        logistic(train, LabelledFeatures(test.x, test.y + 1))
    with pytest.raises(UserError, match="at least two classes"):
        logistic(LabelledFeatures(train.x, train.y * 0), LabelledFeatures(test.x, test.y * 0))
    with pytest.raises(UserError, match=f"no class has {ONE_IN} training images"):
        logistic(LabelledFeatures(train.x[:20], train.y[:20]), test)
    two = LabelledFeatures(test.x, test.y % 2)
    with pytest.raises(UserError, match="roc_auc: expected training images of two classes, not 5"):
        logistic(train, two, Logistic(metric="roc_auc"))
    few = LabelledFeatures(train.x, (torch.arange(100) < 4).long())
    with pytest.raises(UserError, match="validation images of two classes, or 5 training images of each"):
        logistic(few, two, Logistic(metric="roc_auc"))
    marks = torch.ones(100, 3, dtype=torch.long)
    with pytest.raises(UserError, match="some training images with class 0 and some without it"):
        probe(
            LabelledFeatures(train.x, marks),
            None,
            LabelledFeatures(test.x, marks[:20]),
            metric="map11",
            seed=0,
            note=str,
        )


@pytest.mark.slow
@pytest.mark.parametrize("load", [load_digits, load_wine, load_breast_cancer])
def test_the_search_finds_what_a_sweep_of_real_features_finds(load: Any):
    """Seven coarse values, then the neighbours of the best, against all 97."""
    x, y = load(return_X_y=True)
    x = (x - x.mean(0)) / x.std(0).clip(1e-6)
    held = validation_rows(y, 0)
    fitting, checking = Problem(x[~held], y[~held], int(y.max()) + 1), Problem(x[held], y[held], int(y.max()) + 1)

    @functools.cache
    def score(step: int) -> tuple[float, float]:
        return validation_score(fitting, checking, step, "top1")

    found = search(score)
    assert found == max(range(STEPS + 1), key=score)
