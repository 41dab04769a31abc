"""Compare trials without labels: one number from the rank and the uniformity of their features.

RankMe is that of Garrido et al. 2023, arXiv:2210.02885; alignment and uniformity are those of Wang and Isola 2020,
arXiv:2005.10242. The monitor measures all three: runs/monitor.py. Alignment is printed but has no weight: it
falls when features collapse, too, and in the trials measured so far it was lowest where kNN was worst (docs/tune.md).
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from eagleray.runs.metrics import KNN_TOP1, MONITOR_KNN

LABEL_FREE = "label_free"
RANK, ALIGNMENT, UNIFORMITY = "health/backbone_rank", "health/alignment", "health/uniformity"
MEASURED = (RANK, ALIGNMENT, UNIFORMITY)
REFERENCES = (KNN_TOP1, MONITOR_KNN)  # label-free numbers are compared with the first of these that the trials have
LEAST = 4  # trials of which an order says something


class LabelFreeAgreement(NamedTuple):
    """Says how far numbers without labels order the finished trials as kNN does."""

    reference: str  # the key of the kNN accuracy
    trials: int
    correlations: dict[str, float]  # Spearman's, by key, positive where the number agrees

    def line(self) -> str:
        """Return it in words."""
        numbers = ", ".join(f"{key} {value:+.2f}" for key, value in self.correlations.items())
        return f"rank correlation with {self.reference} over {self.trials} finished trials: {numbers}"


def score(record: Mapping[str, Any]) -> float:
    """Return the label-free number of a line of metrics.jsonl, which is higher for better features: the log of RankMe
    less uniformity, which falls as features get better. It is not a number if one is missing."""
    rank, uniformity = record.get(RANK, math.nan), record.get(UNIFORMITY, math.nan)
    return math.log(rank) - uniformity if rank > 0 else math.nan


def objective(record: Mapping[str, Any], key: str) -> float:
    """Return a metric of a line of metrics.jsonl; not a number if it is missing."""
    return score(record) if key == LABEL_FREE else float(record.get(key, math.nan))


def agreement(rows: Iterable[Mapping[str, Any]]) -> LabelFreeAgreement | None:
    """Return how the numbers without labels agree with kNN over the rows of finished trials, or None if these are too
    few or have no kNN accuracy."""
    numbers = [r.get("numbers", {}) for r in rows if r["state"] == "finished"]
    for reference in REFERENCES:
        both = [n for n in numbers if reference in n and math.isfinite(score(n))]
        if len(both) >= LEAST:
            truth = [n[reference] for n in both]
            signs = {LABEL_FREE: 1, RANK: 1, ALIGNMENT: -1, UNIFORMITY: -1}
            measured = {k: s for k, s in signs.items() if all(math.isfinite(objective(n, k)) for n in both)}
            agreed = {k: spearman([s * objective(n, k) for n in both], truth) for k, s in measured.items()}
            return LabelFreeAgreement(reference, len(both), agreed)
    return None


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Return Spearman's rank correlation, from -1 to 1; 0 where all values of a list are equal."""
    from scipy.stats import rankdata  # takes 0.3 s, which commands that compare nothing do without

    varied = len(set(a)) > 1 and len(set(b)) > 1
    return statistics.correlation(rankdata(a).tolist(), rankdata(b).tolist()) if varied else 0.0
