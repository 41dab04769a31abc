"""docs/proof.md: what the results of the sweeps say of each claim of the papers, in words and plots."""

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import common
from proof_claims import CLAIMS, FRACTIONS, SECONDS, Claim, Pair, command

PAGE = common.ROOT / "docs" / "proof.md"
IMAGES = common.ROOT / "docs" / "images" / "proof"
LEAST = 3  # seeds for a verdict
MOST = 5  # seeds where deviations overlap
EDGE = 6  # the largest lead that the plot of all claims tells from others


def of(lines: Sequence[Mapping[str, Any]], sweep: str, name: str, metric: str) -> dict[int, float]:
    """Return the numbers of a setting by seed, shares in percent."""
    mine, scale = [r for r in lines if (r["claim"], r["setting"]) == (sweep, name)], 100 if metric in FRACTIONS else 1
    return {r["seed"]: scale * r["numbers"][metric] for r in mine if metric in r["numbers"]}


def verdict(better: Sequence[float], worse: Sequence[float], *, lower: bool) -> str:
    """Return whether the first setting is better: seen, reversed, not seen or undecided. Means must differ by more than
    both deviations together; where they do not, MOST seeds of each are needed to say that nothing is seen."""
    least = min(len(better), len(worse))
    if least < LEAST:
        return "undecided"
    if abs(ahead := lead(better, worse, lower=lower)) > 1:
        return "seen" if ahead > 0 else "reversed"
    return "not seen" if least >= MOST else "undecided"


def lead(better: Sequence[float], worse: Sequence[float], *, lower: bool) -> float:
    """Return by how much the first setting is better, over the sum of both deviations."""
    gain = statistics.mean(better) - statistics.mean(worse)
    return (-gain if lower else gain) / (statistics.stdev(better) + statistics.stdev(worse) or 1e-9)


def words(values: Sequence[float]) -> str:
    """Return mean, deviation and number of seeds, or a dash."""
    if not values:
        return "-"
    deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{deviation} ({len(values)})"


def chance(a: Sequence[float], b: Sequence[float]) -> str:
    """Return the p-value of Welch's t-test, or a dash where there are too few seeds for a verdict."""
    from scipy.stats import ttest_ind_from_stats  # a machine that only trains may have none

    if min(len(a), len(b)) < LEAST:
        return "-"
    described = [x for part in (a, b) for x in (statistics.mean(part), statistics.stdev(part), len(part))]
    p = ttest_ind_from_stats(*described, equal_var=False).pvalue
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


HEAD = """# Proof on real images

Written by `python benchmarks/proof.py`. For each claim of a paper this page says what we saw at a size that fits two
CPU cores. "Seen" means that the means differ by more than both standard deviations together, with at least three
seeds of each; "reversed" that they do so the other way round; "not seen" that they do not with five seeds; all else
is "undecided". Fewer than three seeds decide nothing. Beside the verdict stands the p-value of Welch's t-test, how
likely so large a difference is by chance: with three seeds some differences that are "seen" are likelier than 0.05, and
with five some below it are "not seen"; of fifty comparisons, two or three fall below 0.05 by chance. The machine was
shared with other programs, so the time of a trial is compared with that of the other setting's trial of the same seed,
which ran in the same hour; other numbers do not depend on it. Numbers are means ± standard deviations over seeds
(number of seeds), in percent unless said otherwise. Each number of each trial is in
[proof.jsonl](../benchmarks/results/proof.jsonl), with its device where that is a GPU.

`python benchmarks/proof_set.py SOURCE` prepares the images below `data/proof`, and this continues all sweeps for an
hour and writes the page anew:

```
python benchmarks/proof.py --hours 1
```

With `--programs N` N trials run side by side, each as a program of its own, without Ray: `--programs 2` on two cores,
or `--programs 14 --keys data.workers=1 precision=fp32 compile=false` on one GPU: on an H100 with 16 cores the 21 trials
of proof_frameworks took under five minutes.

## The images

| Images | Used for | Terms |
| --- | --- | --- |
| CIFAR-10, 50,000 + 10,000 of 32 pixels | all claims but SelfPatch's | no licence stated by its authors; research |
| crops of 500 ImageNet photographs, 28 CamVid and 16 DAVIS frames | SelfPatch | research only; CamVid CC BY-NC 4.0 |
| 2 sequences of DAVIS (100 frames), 12 validation frames of CamVid, with masks | tests of SelfPatch | the same |
| Food-101 at 64 pixels, 1,212 + 505 | no claim yet | research only |
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


def overview(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of all claims with how many of their comparisons have which verdict."""
    text = "\n## The claims\n\n![The lead of each comparison, by claim](images/proof/claims.png)\n\n"
    text += "Each point is a comparison of at least three seeds. In the grey band the means differ by less than both\n"
    text += "deviations together. A claim that is **confounded** is not decided by its verdicts: they may come from\n"
    text += "something else than the paper's idea, which its section names.\n\n"
    text += "| Claim | Verdicts |\n| --- | --- |\n"
    for claim in CLAIMS:
        found = Counter(verdict(*both(claim, pair, lines), lower=pair.lower) for pair in claim.pairs)
        if found:
            shown = ", ".join(f"{n} {name}" for name, n in found.most_common()) if ran(claim, lines) else "not run yet"
            mark = " **Confounded.**" if claim.confounded else ""
            text += f"| [{claim.sweep}](#{claim.sweep}): {claim.claim}{mark} | {shown} |\n"
    return text


def section(claim: Claim, lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the section of a claim."""
    text = f"\n## {claim.sweep}\n\n{claim.claim}\n\n* Setting: {claim.setting}.\n* Tried: {claim.tried}.\n"
    if claim.confounded:
        text += f"* **Confounded**, so the verdicts do not decide the claim: {claim.confounded}.\n"
    text += f"* Command: `{command(claim)}`\n\n"
    if not ran(claim, lines):
        return text + "Not run yet.\n"
    if claim.pairs:
        text += "| said to be better | number | than | number | measure | p | verdict |\n" + 7 * "| --- " + "|\n"
    for pair in claim.pairs:
        a, b = both(claim, pair, lines)
        text += f"| `{pair.better}` | {words(a)} | `{pair.worse}` | {words(b)} | `{pair.metric}` "
        text += f"| {chance(a, b)} | {verdict(a, b, lower=pair.lower)} |\n"
    return text + f"\n![Each seed of {claim.sweep}](images/proof/{claim.sweep}.png)\n"


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
    """Yield the verdict of each comparison with enough seeds, its lead up to EDGE, and its place in the claim's row."""
    for row, claim in enumerate(claims):
        for i, pair in enumerate(claim.pairs):
            a, b = both(claim, pair, lines)
            if min(len(a), len(b)) >= LEAST:
                place = row + 0.7 * ((i + 0.5) / len(claim.pairs) - 0.5)
                ahead = lead(a, b, lower=pair.lower)
                yield verdict(a, b, lower=pair.lower), max(-EDGE, min(EDGE, ahead)), place


def draw_claims(lines: Sequence[Mapping[str, Any]]) -> None:
    """Draw the lead of every comparison, the claims from top to bottom."""
    from matplotlib import pyplot as plt  # a machine that only trains may have none

    from eagleray.base.plotting import BLUE, DPI, GREY, INK, LIGHT, RED

    plt.switch_backend("Agg")
    claims = [claim for claim in CLAIMS if claim.pairs and ran(claim, lines)]
    figure, ax = plt.subplots(figsize=(8, 1 + 0.36 * len(claims)))
    ax.axvspan(-1, 1, color=LIGHT, lw=0, zorder=0)
    colors = {"seen": (BLUE, BLUE), "reversed": (RED, RED), "not seen": (GREY, GREY), "undecided": (INK, "white")}
    points = list(leads(claims, lines))
    for name, (edge, face) in colors.items():
        found = [(x, y) for shown, x, y in points if shown == name]
        ax.scatter([x for x, _ in found], [y for _, y in found], 30, face, edgecolors=edge, label=name)
    ticks = range(-EDGE, EDGE + 1, 2)
    ax.set_xticks(ticks, [f"{x} or less" if x == -EDGE else f"{x} or more" if x == EDGE else str(x) for x in ticks])
    ax.set_xlabel("lead of what the paper prefers, over both standard deviations together")
    ax.set_yticks(range(len(claims)), [claim.sweep.removeprefix("proof_") for claim in claims])
    ax.set_ylim(len(claims) - 0.5, -0.5)
    ax.grid(axis="y", color=LIGHT, lw=0.5)
    ax.set_axisbelow(True)
    ax.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    figure.savefig(IMAGES / "claims.png", dpi=DPI, bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)


def page(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the page for these results."""
    return HEAD + overview(lines) + "".join(section(claim, lines) for claim in CLAIMS)


def write(lines: Sequence[Mapping[str, Any]]) -> None:
    """Write the page and its plots."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    for claim in CLAIMS:
        if ran(claim, lines):
            draw(claim, lines)
    draw_claims(lines)
    PAGE.write_text(page(lines))
