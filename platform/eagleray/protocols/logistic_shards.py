"""Fit and score logistic regression on features that are divided among ranks, as scikit-learn does in one process.

The objective is scikit-learn's: the mean of the cross-entropies of all N samples + lambda / 2 / N * |W|^2. SciPy's
L-BFGS minimises it from W = 0, with scikit-learn's limits. Losses and gradients are summed over ranks, so that all
ranks take the same steps. There are D features and C classes."""

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import expit, log_expit, log_softmax
from sklearn.linear_model import LogisticRegression

from eagleray.base import dist
from eagleray.protocols.classification_scores import METRICS, Array

ROWS = 8192  # number of samples whose features are converted to float64 at a time
TOLERANCE, SEARCHES = 1e-4, 50  # scikit-learn's: largest gradient at the end, most steps of a line search


def fit(x: Array, y: Array, strength: float, iterations: int, device: torch.device) -> LogisticRegression:
    """Fit a classifier with the L2 strength lambda = `strength` to the features of all ranks; x (n, D) and the classes
    y (n,) are those of this rank. Sums over ranks are taken on `device`. Called by all ranks together."""
    counts = total(np.bincount(y, minlength=1 + most(y)).astype(np.float64), device)
    classes, samples = np.flatnonzero(counts), float(counts.sum())
    target, rows = np.searchsorted(classes, y), 1 if len(classes) == 2 else len(classes)  # one row for two: log-odds

    def objective(flat: Array) -> tuple[float, Array]:
        """Return the objective and its gradient for flattened weights and biases (rows, D + 1)."""
        weights = flat.reshape(rows, -1)
        sums = np.zeros(1 + flat.size)
        for first in range(0, len(x), ROWS):
            part, t = x[first : first + ROWS].astype(np.float64), target[first : first + ROWS]
            loss, slope = _losses(part @ weights[:, :-1].T + weights[:, -1], t)
            sums[0] += loss
            sums[1:] += np.concatenate([slope.T @ part, slope.sum(0)[:, None]], 1).ravel()
        sums = total(sums, device) / samples
        decayed = np.concatenate([weights[:, :-1], np.zeros((rows, 1))], 1).ravel() * strength / samples
        return float(sums[0] + flat @ decayed / 2), sums[1:] + decayed

    options = {"maxiter": iterations, "maxls": SEARCHES, "gtol": TOLERANCE, "ftol": 64 * np.finfo(float).eps}
    start = np.zeros(rows * (x.shape[1] + 1))
    result = minimize(objective, start, method="L-BFGS-B", jac=True, options=options)
    weights = result.x.reshape(rows, -1)
    model = LogisticRegression(C=1 / strength, max_iter=iterations)
    model.coef_, model.intercept_, model.classes_ = weights[:, :-1], weights[:, -1], classes
    model.n_iter_ = np.array([result.nit])
    return model


def _losses(z: Array, y: Array) -> tuple[float, Array]:
    """Return the summed cross-entropy of scores z (n, C), or log-odds z (n, 1), and its gradient with respect to z."""
    if z.shape[1] == 1:
        sign = np.where(y == 1, 1.0, -1.0)[:, None]
        return float(-log_expit(sign * z).sum()), expit(z) - (y == 1)[:, None]
    log_probability = log_softmax(z, 1)
    gradient = np.exp(log_probability)
    gradient[np.arange(len(y)), y] -= 1
    return float(-log_probability[np.arange(len(y)), y].sum()), gradient


def total(x: Array, device: torch.device) -> NDArray[np.float64]:
    """Return the sum of this array over all ranks."""
    return dist.total(torch.from_numpy(x).to(device)).cpu().numpy()  # type: ignore[no-any-return]


def most(y: Array) -> int:
    """Return the highest class of all ranks."""
    return max(dist.gather_objects(int(y.max(initial=0))))


def gather(y: Array) -> Array:
    """Return the rows of all ranks, in rank order."""
    return np.concatenate(dist.gather_objects(y))


def metric(name: str, scores: Array, y: Array, device: torch.device) -> float:
    """Return the metric `name` over the samples of all ranks. `scores` (n, C) and labels `y` are those of this rank.

    Accuracies are computed from counts. For other metrics the scores are gathered, as their data sets are small."""
    if dist.size() == 1 or name not in ("top1", "mean_per_class"):
        return METRICS[name](gather(scores), gather(y)) if dist.size() > 1 else METRICS[name](scores, y)
    right, classes = scores.argmax(1) == y, scores.shape[1]
    hits, counts = total(np.stack([np.bincount(c, minlength=classes) for c in (y[right], y)]).astype(float), device)
    if name == "top1":
        return 100 * float(hits.sum() / counts.sum())
    return 100 * float(np.mean(hits[counts > 0] / counts[counts > 0]))
