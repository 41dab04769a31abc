"""Judge the numbers at the end of a run: better than those of the untrained backbone, and of the start, or not.

A number in percent of n held-out images is noisy. With shares p and q of two backbones, the standard error of their
difference is at most sqrt((p (1 - p) + q (1 - q)) / n): that of independent images, and as both see the same images, it
is smaller. A difference of more than two standard errors counts, which chance alone exceeds in one of twenty runs.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from eagleray.runs.health import BELOW, BELOW_START, EQUAL, Finding
from eagleray.runs.metrics import AT_START, CROPS_FOUND, KNN_TOP1, LINEAR_TOP1, UNTRAINED

ERRORS = 2  # standard errors of a difference that chance may make
NUMBERS = {KNN_TOP1: "kNN", LINEAR_TOP1: "linear", CROPS_FOUND: "crops found"}  # that decide, and how they are called
TARGETS = {UNTRAINED: "untrained", AT_START: "the start"}
WORDS = {1: "better than", 0: "no better than", -1: "worse than"}  # by the sign of a comparison


@dataclass(frozen=True)
class Comparison:
    """A number of a backbone in percent of so many held-out images, beside that of another backbone."""

    name: str
    now: float
    before: float
    images: int

    @property
    def noise(self) -> float:
        """Return the difference in percent that chance may make."""
        variance = self.now * (100 - self.now) + self.before * (100 - self.before)
        return ERRORS * float(max(variance, 0.0) / self.images) ** 0.5

    @property
    def sign(self) -> int:
        """Return 1 where the number is above the other one by more than chance, -1 where it is below, else 0."""
        change = self.now - self.before
        return (change > self.noise) - (change < -self.noise)

    @property
    def room(self) -> bool:
        """Return whether a better backbone could be told from the other one."""
        return Comparison(self.name, 100, self.before, self.images).sign > 0

    def __str__(self) -> str:
        return f"{self.name} {self.now:.1f} % against {self.before:.1f} %"


def compare(scores: Mapping[str, float], suffix: str, images: int) -> list[Comparison]:
    """Return the numbers that decide, of those with a counterpart whose key ends with the suffix."""
    both = [key for key in NUMBERS if key in scores and key + suffix in scores and images > 0]
    return [Comparison(NUMBERS[key], scores[key], scores[key + suffix], images) for key in both]


def verdicts(scores: Mapping[str, float], images: int) -> list[str]:
    """Return a sentence for the untrained backbone and for the start, where the scores have their numbers."""
    found = ((target, compare(scores, suffix, images)) for suffix, target in TARGETS.items())
    return [sentence(target, of, images) for target, of in found if of]


def sentence(target: str, comparisons: Sequence[Comparison], images: int) -> str:
    """Return what comparisons with one backbone say, such as `better than untrained: kNN 40.0 % against 30.0 %`."""
    parts = []
    for sign, words in WORDS.items():
        if of := [c for c in comparisons if c.sign == sign]:
            parts.append(f"{words} {target}: {', '.join(map(str, of))}")
    noise = max(c.noise for c in comparisons)
    return f"{'; '.join(parts)} ({images:,} images; up to {noise:.1f} may be chance)"


def judge(scores: Mapping[str, float], images: int, step: int) -> Iterator[Finding]:
    """Yield the findings about the scores at the end of a run, at its last step."""
    untrained = compare(scores, UNTRAINED, images)
    found = {
        BELOW: [c for c in untrained if c.sign < 0],
        EQUAL: [c for c in untrained if c.sign == 0 and c.room],
        BELOW_START: [c for c in compare(scores, AT_START, images) if c.sign < 0],
    }
    for kind, of in found.items():
        if of:
            noise = max(c.noise for c in of)
            yield Finding(step, kind, f"{', '.join(map(str, of))} ({images:,} images; up to {noise:.1f} may be chance)")
