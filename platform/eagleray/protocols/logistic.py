"""Logistic regression on frozen features, its L2 strength searched for: the probe of EsViT's suite of 18 sets, Li et
al. 2021, arXiv:2106.09785, appendix C.5, which follows CLIP's, Radford et al. 2021, arXiv:2103.00020, appendix A.3.

Of the weights W, the biases and n samples it minimises the sum of their cross-entropies + lambda / 2 * |W|^2, with
scikit-learn's L-BFGS. The features are used as they are: neither paper normalises them.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import NonNegativeInt
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression

from eagleray.base.errors import UserError
from eagleray.protocols.classification_scores import METRICS, Array
from eagleray.protocols.features import Labelled
from eagleray.protocols.outcome import Outcome

STEPS, PER_DECADE, LOWEST = 96, 8, -6  # lambda is 10^-6 to 10^6
COARSE = 2 * PER_DECADE  # steps between the seven values that a search begins with
ITERATIONS = 1000
HELD = 5  # one training sample of so many of a class is held out where there is no validation set


def strength(step: int) -> float:
    """Lambda of one of the 97 ends of the 96 steps."""
    return float(10 ** (LOWEST + step / PER_DECADE))


def search(score: Callable[[int], tuple[float, ...]]) -> int:
    """The step with the highest score: of seven that are two decades apart, then of the best one and its neighbours
    at half that distance, and so on to an eighth of a decade. The same as of all steps where scores rise to one
    peak. Of equal ones the first that was looked at stays."""
    found = {step: score(step) for step in range(0, STEPS + 1, COARSE)}
    distance = COARSE
    while distance > 1:
        distance //= 2
        best = max(found, key=lambda step: found[step])
        for step in (best - distance, best + distance):
            if 0 <= step <= STEPS and step not in found:
                found[step] = score(step)
    return max(found, key=lambda step: found[step])


@dataclass(frozen=True)
class Problem:
    """Features (n, D) and classes (n,), or marks (n, C) of 1, 0 and -1: a classifier for each class."""

    x: Array
    y: Array
    classes: int

    def rows(self, kept: Array) -> "Problem":
        return Problem(self.x[kept], self.y[kept], self.classes)

    def both(self, other: "Problem") -> "Problem":
        return Problem(np.concatenate((self.x, other.x)), np.concatenate((self.y, other.y)), self.classes)

    def fit(self, strength: float) -> "Fitted":
        if self.y.ndim == 1:
            return Fitted(self.classes, [_fit(self.x, self.y, strength)])
        lacking = [c for c, m in enumerate(self.y.T) if not {0, 1} <= set(m)]
        if lacking:
            raise UserError(f"logistic: expected training images with class {lacking[0]} and without it")
        return Fitted(self.classes, [_fit(self.x[m >= 0], m[m >= 0], strength) for m in self.y.T])


@dataclass(frozen=True)
class Fitted:
    classes: int
    models: list[LogisticRegression]

    @property
    def iterations(self) -> int:
        return max(int(m.n_iter_.max()) for m in self.models)

    def scores(self, x: Array) -> Array:
        """Log-probabilities (n, C); of marks, log-odds."""
        if len(self.models) > 1:
            return np.stack([m.decision_function(x) for m in self.models], 1)
        [model] = self.models
        z = model.decision_function(x)
        z = np.stack([np.zeros_like(z), z], 1) if z.ndim == 1 else z  # of two classes it is the log-odds
        out = np.full((len(x), self.classes), -np.inf)
        out[:, model.classes_] = z - np.logaddexp.reduce(z, axis=1, keepdims=True)
        return out


def _fit(x: Array, y: Array, strength: float) -> LogisticRegression:
    with warnings.catch_warnings():  # as published it ends after so many iterations, converged or not
        warnings.simplefilter("ignore", ConvergenceWarning)
        return LogisticRegression(C=1 / strength, max_iter=ITERATIONS).fit(x, y)


def loss(scores: Array, y: Array) -> float:
    """Mean cross-entropy of scores as `Fitted` gives them."""
    if y.ndim == 1:
        return float(-scores[np.arange(len(y)), y].mean())
    return float(np.logaddexp(0, np.where(y == 1, -scores, scores))[y >= 0].mean())


def logistic(
    train: Labelled,
    test: Labelled,
    *,
    metric: Literal["top1", "mean_per_class", "roc_auc"] = "top1",
    seed: NonNegativeInt = 0,
    note: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Of images of one class each, whose labels may be any numbers; a fifth of each class finds lambda."""
    return probe(train, None, test, metric=metric, seed=seed, note=note)


def probe(
    train: Labelled, val: Labelled | None, test: Labelled, *, metric: str, seed: int, note: Callable[[str], None]
) -> Outcome:
    """The metric on the test set, in percent, of a classifier that is fitted to training and validation set together,
    with the lambda of the least loss on the validation set; without one, a fifth of each class is held out. The labels
    of `map11` are marks (n, C) of 1, 0 and -1. Raises UserError for labels that do not match."""
    fitting, checking, final = _problems(train, val, test, several=metric == "map11", seed=seed)
    measure = METRICS[metric]

    def score(step: int) -> tuple[float, float]:
        less, found = judged(fitting, checking, step, metric)
        note(f"lambda {strength(step):.3g}: loss {-less:.4f}, {metric} {found:.2f} % on the validation set")
        return less, found

    step = search(score)
    fitted = fitting.both(checking).fit(strength(step))
    number = measure(fitted.scores(final.x), final.y)
    settings = {
        "metric": metric,
        "lambda": strength(step),
        "iterations": f"{fitted.iterations} of at most {ITERATIONS}",
        "validation": f"{len(checking.x)} images, " + ("given" if val else f"1 in {HELD} held out, seed {seed}"),
        "images": [len(fitting.x) + len(checking.x), len(final.x)],
    }
    return Outcome({f"logistic/{metric}": number, "logistic/lambda": strength(step)}, settings)


def judged(fitting: Problem, checking: Problem, step: int, metric: str) -> tuple[float, float]:
    """What a search maximises on the validation set: the loss, negative, and of equal ones the metric. The loss has one
    peak over lambda where the metric of a few hundred images has many, and a search would find any of them."""
    scores = fitting.fit(strength(step)).scores(checking.x)
    return -loss(scores, checking.y), METRICS[metric](scores, checking.y)


def _problems(
    train: Labelled, val: Labelled | None, test: Labelled, *, several: bool, seed: int
) -> tuple[Problem, Problem, Problem]:
    """What is fitted, what picks lambda and what is tested on."""
    x, y, x_test, y_test = (t.cpu().numpy() for t in (*train, *test))
    x_val, y_val = (t.cpu().numpy() for t in val) if val else (x[:0], y[:0])
    if several:
        classes = y.shape[1]
    else:
        names, numbers = np.unique(np.concatenate([y, y_val]), return_inverse=True)
        unknown = np.setdiff1d(y_test, names)
        if len(unknown):
            raise UserError(f"logistic: the test set has label {unknown[0]}, which no training image has")
        if len(np.unique(y)) < 2:
            raise UserError("logistic: expected training images of at least two classes")
        y, y_val, y_test = numbers[: len(y)], numbers[len(y) :], np.searchsorted(names, y_test)
        classes = len(names)
    learnt, final = Problem(x, y, classes), Problem(x_test, y_test, classes)
    if val:
        return learnt, Problem(x_val, y_val, classes), final
    held = held_out(np.zeros(len(y), np.int64) if several else y, seed)
    if not held.any():
        raise UserError(f"logistic: no class has {HELD} training images, so none can be held out to find lambda")
    return learnt.rows(~held), learnt.rows(held), final


def held_out(y: NDArray[np.int64], seed: int) -> NDArray[np.bool_]:
    """Which of the samples with classes (n,) are held out: of each class every fifth, in an order of the seed."""
    order = np.random.default_rng(seed).permutation(len(y))
    held = np.zeros(len(y), bool)
    for c in np.unique(y):
        held[order[y[order] == c][HELD - 1 :: HELD]] = True
    return held
