"""Compare trials without labels, by a score that combines the rank and the uniformity of their features.

The rank is RankMe (Garrido et al. 2023, arXiv:2210.02885). Alignment and uniformity are by Wang and Isola 2020,
arXiv:2005.10242. The monitor measures all three, see runs/monitor.py. Alignment is printed but has no weight: it also
falls when features collapse, and in the trials measured so far it was lowest where kNN was worst (docs/tune.md)."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from eagleray.runs.metrics import KNN_TOP1, MONITOR_KNN

LABEL_FREE = "label_free"
RANK, ALIGNMENT, UNIFORMITY = "health/backbone_rank", "health/alignment", "health/uniformity"
MEASURED = (RANK, ALIGNMENT, UNIFORMITY)
REFERENCES = (KNN_TOP1, MONITOR_KNN)  # kNN accuracies; measures are compared with the first that enough trials report
LEAST = 4  # fewest trials for which a rank correlation is computed


class LabelFreeAgreement(NamedTuple):
    """The agreement of two rankings of a sweep's finished trials: by label-free measures and by kNN accuracy."""

    reference: str  # the key of the kNN accuracy
    trials: int
    correlations: dict[str, float]  # Spearman's rank correlation of each measure with kNN, positive if they agree

    def line(self) -> str:
        """Return the correlations as a line of text."""
        numbers = ", ".join(f"{key} {value:+.2f}" for key, value in self.correlations.items())
        return f"rank correlation with {self.reference} over {self.trials} finished trials: {numbers}"


def score(record: Mapping[str, Any]) -> float:
    """Return the label-free score of a line of metrics.jsonl: the log of RankMe minus the uniformity loss. It is higher
    for better features. NaN if RankMe or the uniformity loss is missing."""
    rank, uniformity = record.get(RANK, math.nan), record.get(UNIFORMITY, math.nan)
    return math.log(rank) - uniformity if rank > 0 else math.nan


def objective(record: Mapping[str, Any], key: str) -> float:
    """Return the metric `key` of a line of metrics.jsonl or, for LABEL_FREE, its score. NaN if that is missing."""
    return score(record) if key == LABEL_FREE else float(record.get(key, math.nan))


def agreement(rows: Iterable[Mapping[str, Any]]) -> LabelFreeAgreement | None:
    """Return how label-free measures agree with kNN over finished trials; None if fewer than LEAST report both."""
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
    """Return Spearman's rank correlation of two lists, from -1 to 1; 0 if all values of a list are equal."""
    from scipy.stats import rankdata  # imported here, as it takes 0.3 s and only comparisons need it

    varied = len(set(a)) > 1 and len(set(b)) > 1
    return statistics.correlation(rankdata(a).tolist(), rankdata(b).tolist()) if varied else 0.0
