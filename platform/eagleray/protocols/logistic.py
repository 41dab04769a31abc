"""Fit logistic regression to frozen features and search for its L2 strength lambda: the probe of EsViT's 18 datasets,
Li et al. 2021, arXiv:2106.09785, appendix C.5, after CLIP's, Radford et al. 2021, arXiv:2103.00020, appendix A.3.

Over the weights W and the biases, scikit-learn's L-BFGS minimises the sum of the samples' cross-entropies + lambda / 2
* |W|^2. The features are not normalised, as in both papers. On several ranks, each has a share of the features."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression

from eagleray.base import devices, dist
from eagleray.base.errors import UserError
from eagleray.protocols import logistic_shards
from eagleray.protocols.catalogue import Logistic
from eagleray.protocols.classification_scores import Array
from eagleray.protocols.features import LabelledFeatures, Shard
from eagleray.protocols.outcome import Outcome

STEPS, PER_DECADE, LOWEST = 96, 8, -6  # lambda is 10^-6 to 10^6, in 96 steps of an eighth of a decade
COARSE = 2 * PER_DECADE  # steps between the seven values of lambda that are tried first
ITERATIONS = 1000
ONE_IN = 5  # without a validation set, one in five training samples of each class is held out


def strength(step: int) -> float:
    """Return the lambda of a step of the search, from 0 to 96. The values are spaced logarithmically."""
    return float(10 ** (LOWEST + step / PER_DECADE))


def search(score: Callable[[int], tuple[float, ...]]) -> int:
    """Return the step of lambda with the highest score, without computing the scores of all steps.

    Seven steps, two decades of lambda apart, are scored first. Then the two neighbours of the best step at half that
    distance are scored, and so on down to an eighth of a decade. If the scores have a single peak, the result is the
    best of all steps. Of equal scores, the one computed first wins."""
    scores = {step: score(step) for step in range(0, STEPS + 1, COARSE)}
    distance = COARSE
    while distance > 1:
        distance //= 2
        best = max(scores, key=lambda step: scores[step])
        for step in (best - distance, best + distance):
            if 0 <= step <= STEPS and step not in scores:
                scores[step] = score(step)
    return max(scores, key=lambda step: scores[step])


@dataclass(frozen=True)
class Problem:
    """The samples of this rank to which classifiers are fitted: features x (n, D) with labels y.

    The labels are classes (n,) for one classifier of all classes, or marks (n, C) for a binary classifier of each
    class. A mark is 1 with the class, 0 without it and -1 if the sample does not count for this class."""

    x: Array
    y: Array
    classes: int
    device: torch.device = devices.CPU  # device on which numbers are summed over ranks

    @property
    def total(self) -> int:
        """The number of samples of all ranks."""
        return sum(dist.gather_objects(len(self.x)))

    def select(self, rows: Array) -> "Problem":
        """Return a problem with only these rows of the samples."""
        return replace(self, x=self.x[rows], y=self.y[rows])

    def join(self, other: "Problem") -> "Problem":
        """Return the samples of this problem followed by those of the other."""
        return replace(self, x=np.concatenate((self.x, other.x)), y=np.concatenate((self.y, other.y)))

    def fit(self, strength: float) -> "LogisticModel":
        """Fit the classifiers with the L2 strength lambda = `strength`.

        Raises UserError when a binary classifier has no sample with its class, or none without it."""
        if self.y.ndim == 1:
            return LogisticModel(self.classes, [_fit(self.x, self.y, strength, self.device)])
        marks = [set().union(*seen) for seen in zip(*dist.gather_objects([set(m) for m in self.y.T]), strict=True)]
        constant = [c for c, seen in enumerate(marks) if not {0, 1} <= seen]
        if constant:
            raise UserError(f"logistic: expected some training images with class {constant[0]} and some without it")
        return LogisticModel(self.classes, [_fit(self.x[m >= 0], m[m >= 0], strength, self.device) for m in self.y.T])


@dataclass(frozen=True)
class LogisticModel:
    """Fitted logistic regression: one classifier of all classes, or a binary classifier for each class."""

    classes: int
    models: list[LogisticRegression]

    @property
    def iterations(self) -> int:
        """The number of iterations of the fit that took the most."""
        return max(int(m.n_iter_.max()) for m in self.models)

    def scores(self, x: Array) -> Array:
        """Return log-probabilities (n, C) of classes, or log-odds (n, C) of binary classifiers."""
        if len(self.models) > 1:
            return np.stack([_decide(m, x) for m in self.models], 1)
        [model] = self.models
        z = _decide(model, x)
        z = np.stack([np.zeros_like(z), z], 1) if z.ndim == 1 else z  # for two classes, z are log-odds (n,)
        out = np.full((len(x), self.classes), -np.inf)
        out[:, model.classes_] = z - np.logaddexp.reduce(z, axis=1, keepdims=True)
        return out


def _decide(model: LogisticRegression, x: Array) -> Array:
    """Return the values of scikit-learn's decision function; if this rank has no samples, an empty array."""
    if len(x):
        return model.decision_function(x)  # type: ignore[no-any-return]
    return np.zeros(0 if len(model.coef_) == 1 else (0, len(model.coef_)))


def _fit(x: Array, y: Array, strength: float, device: torch.device) -> LogisticRegression:
    if dist.size() > 1:
        return logistic_shards.fit(x, y, strength, ITERATIONS, device)
    with warnings.catch_warnings():  # as in the papers, a fit may end after ITERATIONS without having converged
        warnings.simplefilter("ignore", ConvergenceWarning)
        return LogisticRegression(C=1 / strength, max_iter=ITERATIONS).fit(x, y)


def loss(scores: Array, y: Array) -> float:
    """Return the mean cross-entropy of the scores of a LogisticModel, over the samples of all ranks."""
    if y.ndim == 1:
        losses = -scores[np.arange(len(y)), y]
    else:
        losses = np.logaddexp(0, np.where(y == 1, -scores, scores))[y >= 0]
    if dist.size() == 1:
        return float(losses.mean())
    value, count = map(sum, zip(*dist.gather_objects((float(losses.sum()), losses.size)), strict=True))
    return float(value / count)


def logistic(
    train: LabelledFeatures,
    test: LabelledFeatures,
    settings: Logistic = Logistic(),
    note: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Measure `settings.metric` in percent on images that have one class each.

    Labels may be any integers. A fifth of the training images of each class is held out to pick lambda."""
    return probe(train, None, test, metric=settings.metric, seed=settings.seed, note=note)


def probe(
    train: LabelledFeatures,
    val: LabelledFeatures | None,
    test: LabelledFeatures,
    *,
    metric: str,
    seed: int,
    note: Callable[[str], None],
) -> Outcome:
    """Pick the lambda with the least loss on the validation set, and measure `metric` in percent on the test set.

    The classifier that is tested is fitted to the training and validation sets together. Without a validation set, a
    fifth of each class of the training set is held out. For the metric `map11` the labels are marks (n, C) of 1, 0 and
    -1. On several ranks, the arguments are the sets of this rank, and all ranks return the same outcome. Raises
    UserError when the labels of the sets do not match."""
    training, given, final = _problems(train, val, test, metric)
    step, images = _pick(training, given, metric, seed, note)
    model = (training.join(given) if given else training).fit(strength(step))
    number = logistic_shards.metric(metric, model.scores(final.x), final.y, final.device)
    settings = {
        "metric": metric,
        "lambda": strength(step),
        "iterations": f"{model.iterations} of at most {ITERATIONS}",
        "validation": f"{images[1]} images, " + ("given" if val else f"1 in {ONE_IN} held out, seed {seed}"),
        "images": [sum(images), final.total],
    }
    return Outcome({f"logistic/{metric}": number, "logistic/lambda": strength(step)}, settings)


def _pick(
    training: Problem, given: Problem | None, metric: str, seed: int, note: Callable[[str], None]
) -> tuple[int, tuple[int, int]]:
    """Return the step of the best lambda on the validation set, and the numbers of images to fit to and to validate on.

    Without a `given` validation set, `training` is split for the search; the copies are freed when this returns."""
    fitting, validation = (training, given) if given else hold_out(training, seed)
    if metric == "roc_auc" and len(np.unique(logistic_shards.gather(validation.y))) != 2:
        raise UserError(f"roc_auc: expected validation images of two classes, or {ONE_IN} training images of each")

    def score(step: int) -> tuple[float, float]:
        negative, value = validation_score(fitting, validation, step, metric)
        note(f"lambda {strength(step):.3g}: loss {-negative:.4f}, {metric} {value:.2f} % on the validation set")
        return negative, value

    return search(score), (fitting.total, validation.total)


def validation_score(fitting: Problem, validation: Problem, step: int, metric: str) -> tuple[float, float]:
    """Return what the search for lambda maximises on the validation set: the negative loss, then the metric.

    The metric only decides between equal losses. As a function of lambda the loss has a single minimum, while the
    metric of a few hundred images has many peaks, and the search could end at any of them."""
    scores = fitting.fit(strength(step)).scores(validation.x)
    return -loss(scores, validation.y), logistic_shards.metric(metric, scores, validation.y, validation.device)


def _problems(
    train: LabelledFeatures, val: LabelledFeatures | None, test: LabelledFeatures, metric: str
) -> tuple[Problem, Problem | None, Problem]:
    """Return the samples to train on, those to pick lambda on (None without `val`), and those to test on.

    Raises UserError when the labels of the sets do not match each other or the metric."""
    x, x_test = (s.x.float().cpu().numpy() for s in (train, test))  # NumPy has no bfloat16
    y, y_test = (s.y.cpu().numpy() for s in (train, test))
    x_val, y_val = (val.x.float().cpu().numpy(), val.y.cpu().numpy()) if val else (x[:0], y[:0])
    if metric == "map11":
        classes = y.shape[1]
    else:
        several, names, tested = (
            np.unique(logistic_shards.gather(np.unique(labels))) for labels in (y, np.concatenate([y, y_val]), y_test)
        )
        unknown = np.setdiff1d(tested, names)
        if len(unknown):
            raise UserError(f"logistic: the test set has label {unknown[0]}, which no training image has")
        if len(several) < 2:
            raise UserError("logistic: expected training images of at least two classes")
        if metric == "roc_auc" and len(names) != 2:
            raise UserError(f"roc_auc: expected training images of two classes, not {len(names)}")
        y, y_val, y_test = (np.searchsorted(names, labels) for labels in (y, y_val, y_test))
        classes = len(names)
    device = train.x.device
    training, final = Problem(x, y, classes, device), Problem(x_test, y_test, classes, device)
    return training, Problem(x_val, y_val, classes, device) if val else None, final


def hold_out(training: Problem, seed: int) -> tuple[Problem, Problem]:
    """Split the training samples in two: those to fit to while lambda is searched, and those on which it is picked.

    Raises UserError when no class has enough images for both."""
    y = training.y
    held_out = validation_rows(logistic_shards.gather(np.zeros(len(y), np.int64) if y.ndim > 1 else y), seed)
    if not held_out.any():
        raise UserError(f"logistic: no class has {ONE_IN} training images, so none can be held out to pick lambda")
    shard = Shard.of(len(y))
    mine = held_out[shard.first : shard.last]
    return training.select(~mine), training.select(mine)


def validation_rows(y: NDArray[np.int64], seed: int) -> NDArray[np.bool_]:
    """Return a mask (n,) of the samples to hold out: one in five of each class, at random. `y` (n,) are their
    classes."""
    order = np.random.default_rng(seed).permutation(len(y))
    held_out = np.zeros(len(y), bool)
    for c in np.unique(y):
        held_out[order[y[order] == c][ONE_IN - 1 :: ONE_IN]] = True
    return held_out
