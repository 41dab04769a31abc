"""Judge whether a backbone scores higher at the end of its run than the untrained backbone, and than at the start.

A score in percent is a share of n held-out images, and so noisy. For the scores p and q of two backbones, the standard
error of p - q is sqrt((p (1 - p) + q (1 - q)) / n) on independent images, and less here, as both see the same images. A
difference counts if it is above two standard errors, which chance alone exceeds in one of twenty runs.

Without labels there are two scores. The share of crops found decides, unless LiDAR contradicts (docs/evaluate.md)."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from eagleray.runs.health import BELOW, BELOW_START, EQUAL, Finding
from eagleray.runs.metrics import AT_START, CROPS_FOUND, CROPS_LIDAR, KNN_TOP1, LIDAR_ERROR, LINEAR_TOP1, UNTRAINED

ERRORS = 2  # number of standard errors up to which a difference may be chance
NUMBERS = {KNN_TOP1: "kNN", LINEAR_TOP1: "linear", CROPS_FOUND: "crops found"}  # names of scores in percent, by key
TARGETS = {UNTRAINED: "untrained", AT_START: "the start"}  # backbones to compare with, by the endings of their keys
WORDS = {1: "better than", 0: "no better than", -1: "worse than"}  # keys are the signs of a comparison


class Comparison(NamedTuple):
    """A score of a backbone beside that of an earlier one, and the largest difference that may be chance."""

    name: str
    now: float
    before: float
    noise: float
    unit: str = ""
    room: bool = True  # whether a perfect score would be above `before` by more than chance

    @classmethod
    def of_shares(cls, name: str, now: float, before: float, images: int) -> "Comparison":
        """Compare two scores in percent, both measured on `images` images."""
        room = 100 - before > _noise(100, before, images)
        return cls(name, now, before, _noise(now, before, images), " %", room)

    @property
    def sign(self) -> int:
        """Return 1 if `now` is above `before` by more than chance, -1 if it is below by more than chance, else 0."""
        change = self.now - self.before
        return (change > self.noise) - (change < -self.noise)

    def __str__(self) -> str:
        return f"{self.name} {self.now:.1f}{self.unit} against {self.before:.1f}{self.unit}"


def _noise(now: float, before: float, images: int) -> float:
    """Return the largest difference that may be chance between two scores in percent of `images` images."""
    return ERRORS * float(max(now * (100 - now) + before * (100 - before), 0.0) / images) ** 0.5


def compare(scores: Mapping[str, float], suffix: str, images: int) -> list[Comparison]:
    """Compare each score with that of another backbone, whose key ends in `suffix`, if `scores` has both."""
    both = [key for key in NUMBERS if key in scores and key + suffix in scores and images > 0]
    found = [Comparison.of_shares(NUMBERS[key], scores[key], scores[key + suffix], images) for key in both]
    if CROPS_LIDAR in scores and CROPS_LIDAR + suffix in scores:
        noise = ERRORS * (scores[LIDAR_ERROR] ** 2 + scores[LIDAR_ERROR + suffix] ** 2) ** 0.5
        found.append(Comparison("LiDAR", scores[CROPS_LIDAR], scores[CROPS_LIDAR + suffix], noise))
    return found


def contradict(comparisons: Sequence[Comparison]) -> bool:
    """Return whether the two scores without labels contradict each other: LiDAR differs by more than chance, and the
    crops found do not differ in the same direction."""
    sign = {c.name: c.sign for c in comparisons}
    lidar, found = sign.get("LiDAR", 0), sign.get(NUMBERS[CROPS_FOUND], 0)
    return lidar != 0 and lidar != found


def verdicts(scores: Mapping[str, float], images: int) -> list[str]:
    """Return a sentence that compares with the untrained backbone, and one with the start, if `scores` has theirs."""
    found = ((target, compare(scores, suffix, images)) for suffix, target in TARGETS.items())
    return [sentence(target, of, images) for target, of in found if of]


def sentence(target: str, comparisons: Sequence[Comparison], images: int) -> str:
    """Return what `comparisons` with one backbone say, such as `better than untrained: kNN 40.0 % against 30.0 %`."""
    if contradict(comparisons):
        return f"no labels, and unclear whether better than {target}: {listed(comparisons, images)}"
    deciding = [c for c in comparisons if c.unit]
    parts = []
    for sign, words in WORDS.items():
        if of := [c for c in deciding if c.sign == sign]:
            more = [c for c in comparisons if not c.unit]
            parts.append(f"{words} {target}: {listed([*of, *more], images)}")
    return "; ".join(parts)


def listed(comparisons: Sequence[Comparison], images: int) -> str:
    """Return the comparisons as text, each with the largest difference that may be chance."""
    numbers = ", ".join(f"{c} (±{c.noise:.1f} by chance)" for c in comparisons)
    return f"{numbers} of {images:,} images"


def judge(scores: Mapping[str, float], images: int, step: int) -> Iterator[Finding]:
    """Yield findings about the scores at the last step of a run: those below the untrained backbone's, those below the
    start's and, if none is above the untrained backbone's, those that differ from it only by chance."""
    untrained, start = (
        [] if contradict(of) else of for of in (compare(scores, suffix, images) for suffix in (UNTRAINED, AT_START))
    )
    better = any(c.sign > 0 for c in untrained)
    found = {
        BELOW: [c for c in untrained if c.sign < 0],
        EQUAL: [c for c in untrained if c.sign == 0 and c.room and c.unit and not better],
        BELOW_START: [c for c in start if c.sign < 0],
    }
    for kind, of in found.items():
        if of:
            yield Finding(step, kind, listed(of, images))
