"""docs/proof.md: what the results of the sweeps say of each claim of the papers, in words and plots."""

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import common
from proof_claims import CLAIMS, FRACTIONS, SECONDS, Claim, Pair

PAGE = common.ROOT / "docs" / "proof.md"
IMAGES = common.ROOT / "docs" / "images" / "proof"
LEVEL = 0.05  # of all verdicts together
POWER = 0.8  # with which a difference is called visible
EDGE = 4  # the largest lead that the plot of all claims tells from others


def of(lines: Sequence[Mapping[str, Any]], sweep: str, name: str, metric: str) -> dict[int, float]:
    """Return the numbers of a setting by seed, shares in percent."""
    mine, scale = [r for r in lines if (r["claim"], r["setting"]) == (sweep, name)], 100 if metric in FRACTIONS else 1
    return {r["seed"]: scale * r["numbers"][metric] for r in mine if metric in r["numbers"]}


class Compared(NamedTuple):
    """Two settings beside each other: the gain of the first over the second, by Welch's t-test."""

    gain: float  # positive: the setting is ahead that the paper prefers
    error: float  # standard error of the gain
    freedom: float  # degrees of freedom

    @property
    def p(self) -> float:
        """How likely a gain of this size is by chance, in either direction."""
        from scipy.stats import t  # a machine that only trains may have none

        return float(2 * t.sf(abs(self.gain) / self.error, self.freedom))

    def width(self, level: float) -> float:
        """Return half the width of the interval of the gain that misses the true one with chance `level`."""
        from scipy.stats import t  # a machine that only trains may have none

        return float(t.ppf(1 - level / 2, self.freedom) * self.error)

    def visible(self, level: float) -> float:
        """Return the true gain that would be told from none at this level with the chance POWER: the t of a true gain
        is not central, which matters with few seeds."""
        from scipy.optimize import brentq
        from scipy.stats import nct

        edge = self.width(level) / self.error
        return float(brentq(lambda true: nct.sf(edge, self.freedom, true) - POWER, 0, 10 * edge) * self.error)


def compare(better: Sequence[float], worse: Sequence[float], *, lower: bool) -> Compared | None:
    """Compare the numbers of two settings, of which lower ones may be better; None where there are too few."""
    if min(len(better), len(worse)) < 2:
        return None
    gain = statistics.mean(better) - statistics.mean(worse)
    a, b = (max(statistics.variance(x) / len(x), 1e-12) for x in (better, worse))
    freedom = (a + b) ** 2 / (a**2 / (len(better) - 1) + b**2 / (len(worse) - 1))
    return Compared(-gain if lower else gain, math.sqrt(a + b), freedom)


def verdicts(lines: Sequence[Mapping[str, Any]]) -> dict[tuple[str, Pair], str]:
    """Return the verdict of each comparison that decides: seen, reversed, not seen, or unfinished while seeds are left.

    By Holm's method the chance that any of them is seen or reversed by mistake is at most LEVEL. An unfinished
    comparison takes its share of that from the start, so that what is seen stays seen when others end."""
    found, tested = dict[tuple[str, Pair], str](), list[tuple[float, tuple[str, Pair], float]]()
    for claim in CLAIMS:
        for pair in claim.pairs:
            a, b = both(claim, pair, lines)
            compared = compare(a, b, lower=pair.lower)
            found[claim.sweep, pair] = "unfinished"
            if compared and min(len(a), len(b)) >= claim.seeds:
                found[claim.sweep, pair] = "not seen"
                tested.append((compared.p, (claim.sweep, pair), compared.gain))
    for rank, (p, key, gain) in enumerate(sorted(tested)):
        if p > LEVEL / (len(found) - rank):
            break
        found[key] = "seen" if gain > 0 else "reversed"
    return found


def words(values: Sequence[float]) -> str:
    """Return mean, deviation and number of seeds, or a dash."""
    if not values:
        return "-"
    deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{deviation} ({len(values)})"


HEAD = """# Proof on real images

This page tests claims of papers with short training runs, mostly on two CPU cores. Most runs take 150 to 1,200 steps on
CIFAR-10; the papers' runs take hundreds of thousands of steps.

Each comparison has two settings, which differ only in the listed keys. We fixed the number of seeds before the first
run. Verdicts use Welch's t-test; Holm's method limits the chance of any false positive on this page to 5 %:

| Verdict | Meaning |
| --- | --- |
| seen | the setting that the paper prefers is significantly better |
| reversed | the setting that the paper prefers is significantly worse |
| not seen (detectable: D) | the difference is not significant, which is no evidence against the paper. \
At the strictest level of Holm's method, the test would detect a true difference of D in four of five cases |
| unfinished | runs of some seeds are missing |
| - | the comparison has no verdict and only adds information |

Tables give means ± standard deviations over seeds, and the number of seeds in brackets. Accuracies, mIoU and J&F are in
percent. The column `gain` says by how much the setting that the paper prefers is better, ± half the width of the 95 %
confidence interval. `wall_seconds` is a setting's training time as a percentage of the other setting's time with the
same seed. Both times come from the same hour on a shared machine. [proof.jsonl](../benchmarks/results/proof.jsonl) has
the numbers of each run. For earlier comparisons, whose settings differed in more keys, see the [log](log.md).

`python benchmarks/proof_set.py SOURCE` prepares the images of the folder SOURCE and writes them to `data/proof`. The
next command continues all sweeps for one hour and rewrites this page; with `--programs 2`, it runs two trials in
parallel:

```
python benchmarks/proof.py --hours 1
```

To continue only one sweep, run `eagleray tune NAME out=runs/proof/NAME --max-concurrent 1 --resume`.

## The images

| Images | Used for | Terms |
| --- | --- | --- |
| CIFAR-10: 50,000 training and 10,000 test images of 32 pixels | all claims except SelfPatch's | \
research; the authors state no licence |
| crops of 500 ImageNet photographs, 28 CamVid frames and 16 DAVIS frames | SelfPatch's training | \
research only; CamVid CC BY-NC 4.0 |
| 2 DAVIS sequences (100 frames) and 12 CamVid validation frames, with masks | SelfPatch's tests | the same |
"""


def ran(claim: Claim, lines: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether any trial of a claim has ended."""
    return any(r["claim"] == claim.sweep for r in lines)


def both(claim: Claim, pair: Pair, lines: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """Return the numbers of the setting that should be better, and of the other one.

    Seeds may have run on other days, at other speeds: each is timed in percent of what the other setting took."""
    better, worse = (of(lines, claim.sweep, name, pair.metric) for name in (pair.better, pair.worse))
    if pair.metric == SECONDS:
        seeds = [seed for seed in better if seed in worse]
        better, worse = ({seed: 100 * part[seed] / worse[seed] for seed in seeds} for part in (better, worse))
    return [list(better.values()), list(worse.values())]


def overview(lines: Sequence[Mapping[str, Any]], found: Mapping[tuple[str, Pair], str]) -> str:
    """Return the table of all claims with how many of their comparisons have which verdict."""
    text = "\n## The claims\n\n![The gain of each comparison, by claim](images/proof/claims.png)\n\n"
    text += 'Each point is one finished comparison; filled points have the verdict "seen" or "reversed". For points\n'
    text += "in the grey band, the 95 % confidence interval contains zero.\n\n"
    text += "| Claim | Verdicts |\n| --- | --- |\n"
    for claim in CLAIMS:
        if claim.pairs:
            each = Counter(found[claim.sweep, pair] for pair in claim.pairs)
            shown = ", ".join(f"{n} {name}" for name, n in each.most_common()) if ran(claim, lines) else "not run yet"
            text += f"| [{claim.sweep}](#{claim.sweep}) | {shown} |\n"
    return text


def section(claim: Claim, lines: Sequence[Mapping[str, Any]], found: Mapping[tuple[str, Pair], str]) -> str:
    """Return the section of a claim, with its verdicts among all that were found."""
    text = f"\n## {claim.sweep}\n\n{claim.claim}\n\n* {claim.setting}\n"
    keys = ", ".join(f"`{key}`" for key in claim.differs)
    text += f"* The compared settings differ in {keys}.\n" if keys else ""
    text += f"* {claim.note}\n" if claim.note else ""
    text += "\n"
    if not ran(claim, lines):
        return text + "This sweep has not run yet.\n"
    if claim.pairs or claim.beside:
        text += "<!-- written by benchmarks/proof.py -->\n\n"
        text += "| better according to the paper | number | compared with | number | measure | gain | p | verdict |\n"
        text += 8 * "| --- " + "|\n"
        for pair in (*claim.pairs, *claim.beside):
            a, b = both(claim, pair, lines)
            cells = [f"`{pair.better}`", words(a), f"`{pair.worse}`", words(b), f"`{pair.metric}`"]
            cells += judged(compare(a, b, lower=pair.lower), found.get((claim.sweep, pair)), len(found))
            text += f"| {' | '.join(cells)} |\n"
        text += "\n<!-- :written by benchmarks/proof.py -->\n\n"
    return f"{text}![Each seed of {claim.sweep}](images/proof/{claim.sweep}.png)\n"


def judged(compared: Compared | None, verdict: str | None, comparisons: int) -> list[str]:
    """Return the gain, the p-value and the verdict of a comparison in words, one of so many on the page."""
    if compared is None:
        return ["-", "-", verdict or "-"]
    p = "< 0.001" if compared.p < 0.001 else f"{compared.p:.3f}"
    if verdict == "not seen":
        verdict += f" (detectable: {compared.visible(LEVEL / comparisons):.2g})"
    return [f"{compared.gain:+.2f} ± {compared.width(0.05):.2f}", p, verdict or "-"]


def draw(claim: Claim, lines: Sequence[Mapping[str, Any]]) -> None:
    """Draw each seed of each setting of a claim, by measure."""
    from matplotlib import pyplot as plt  # a machine that only trains may have none

    from eagleray.base.plotting import BLUE, DPI, GREY

    plt.switch_backend("Agg")
    mine = [r for r in lines if r["claim"] == claim.sweep]
    metrics = sorted({k for r in mine for k in r["numbers"]})
    names = list(dict.fromkeys(r["setting"] for r in mine))
    size = 4.2 * len(metrics), 0.7 + 0.4 * len(names)
    figure, axes = plt.subplots(1, len(metrics), figsize=size, squeeze=False, sharey=True)
    for ax, metric in zip(axes[0], metrics, strict=True):
        for y, name in enumerate(names):
            values = list(of(lines, claim.sweep, name, metric).values())
            ax.plot(values, [y] * len(values), "o", color=BLUE, alpha=0.6)
            if values:
                ax.plot([statistics.mean(values)], [y], "|", color=GREY, ms=16)
        ax.set_xlabel(metric)
    axes[0, 0].set_yticks(range(len(names)), names)
    axes[0, 0].set_ylim(len(names) - 0.5, -0.5)
    figure.savefig(IMAGES / f"{claim.sweep}.png", dpi=DPI, bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)


def leads(claims: Sequence[Claim], lines: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, float, float]]:
    """Yield the verdict of each finished comparison, its gain in half widths of its interval, up to EDGE, and its place
    in the claim's row."""
    found = verdicts(lines)
    for row, claim in enumerate(claims):
        for i, pair in enumerate(claim.pairs):
            compared = compare(*both(claim, pair, lines), lower=pair.lower)
            if compared and found[claim.sweep, pair] != "unfinished":
                place = row + 0.7 * ((i + 0.5) / len(claim.pairs) - 0.5)
                ahead = compared.gain / compared.width(0.05)
                yield found[claim.sweep, pair], max(-EDGE, min(EDGE, ahead)), place


def draw_claims(lines: Sequence[Mapping[str, Any]]) -> None:
    """Draw the gain of every comparison, the claims from top to bottom."""
    from matplotlib import pyplot as plt  # a machine that only trains may have none

    from eagleray.base.plotting import BLUE, DPI, GREY, LIGHT, RED

    plt.switch_backend("Agg")
    points = list(leads(CLAIMS, lines))
    claims = [claim for i, claim in enumerate(CLAIMS) if any(round(y) == i for *_, y in points)]
    points = list(leads(claims, lines))
    figure, ax = plt.subplots(figsize=(8, 1 + 0.36 * len(claims)))
    ax.axvspan(-1, 1, color=LIGHT, lw=0, zorder=0)
    for name, edge, face in (("seen", BLUE, BLUE), ("reversed", RED, RED), ("not seen", GREY, "white")):
        found = [(x, y) for shown, x, y in points if shown == name]
        ax.scatter([x for x, _ in found], [y for _, y in found], 30, face, edgecolors=edge, label=name)
    ticks = range(-EDGE, EDGE + 1, 2)
    ax.set_xticks(ticks, [f"{x} or less" if x == -EDGE else f"{x} or more" if x == EDGE else str(x) for x in ticks])
    ax.set_xlabel("gain of what the paper prefers, in half widths of its 95 % interval")
    ax.set_yticks(range(len(claims)), [claim.sweep.removeprefix("proof_") for claim in claims])
    ax.set_ylim(len(claims) - 0.5, -0.5)
    ax.grid(axis="y", color=LIGHT, lw=0.5)
    ax.set_axisbelow(True)
    ax.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    figure.savefig(IMAGES / "claims.png", dpi=DPI, bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)


def page(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the page for these results."""
    found = verdicts(lines)
    return HEAD + overview(lines, found) + "".join(section(claim, lines, found) for claim in CLAIMS)


def write(lines: Sequence[Mapping[str, Any]]) -> None:
    """Write the page and its plots."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    for claim in CLAIMS:
        if ran(claim, lines):
            draw(claim, lines)
    draw_claims(lines)
    PAGE.write_text(page(lines))
