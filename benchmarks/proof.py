"""Run or continue the sweeps of the papers' claims, and write docs/proof.md from their results.

`--hours H` trains for so long, the claims that decide most per hour first, one trial at a time on one thread. Every
trial that has ended is a line of benchmarks/results/proof.jsonl. `--page` writes the page and its plots alone.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import common
import matplotlib as mpl

from eagleray.base.errors import UserError
from eagleray.base.files import read_lines
from eagleray.base.plotting import BLUE, DPI, GREY

mpl.use("Agg")
from matplotlib import pyplot as plt

RUNS = Path("runs/proof")
RESULTS = common.ROOT / "benchmarks" / "results" / "proof.jsonl"
PAGE = common.ROOT / "docs" / "proof.md"
IMAGES = common.ROOT / "docs" / "images" / "proof"
LEAST = 3  # seeds for a verdict
MOST = 5  # seeds where deviations overlap
WARM = 30  # steps before a jump of the gradient counts
HISTORY = 100  # steps whose median a gradient norm is compared with

KNN, TOP1, SECONDS, JUMP = "knn/top1", "classifier/top1", "wall_seconds", "jump"
CORRESPONDENCE = "correspondence/accuracy"
DAVIS = "davis/J&F"


class Pair(NamedTuple):
    """Two settings of a sweep, of which the paper says that the first is better."""

    better: str
    worse: str
    metric: str
    lower: bool = False  # a lower number is better


class Claim(NamedTuple):
    """A claim of a paper and the sweep that decides it."""

    sweep: str
    claim: str  # in our words
    setting: str
    pairs: tuple[Pair, ...]
    protocols: tuple[str, ...] = ()  # of `eagleray evaluate`, after the training of each trial
    tried: str = "nothing else yet"


CIFAR = "ViT of 4 blocks on CIFAR-10, 4-pixel patches (8 x 8 tokens)"
DRLOC = tuple(Pair(f"{name}_drloc", name, TOP1) for name in ("swin", "cvt"))


def drloc(share: int) -> Claim:
    """Return the claim about DRLoc with a share of the labels, in percent."""
    text = f"DRLoc: predicting distances between tokens raises accuracy with {share} % of the labels."
    return Claim(f"proof_drloc_{share}", text, "small Swin and CvT on CIFAR-10, batches of 128, 390 steps", DRLOC)


CLAIMS = (  # the most worth per hour first
    Claim(
        "proof_frozen",
        "MoCo v3, figure 6: a random patch projection that is not trained has lower gradient spikes at a high rate.",
        f"{CIFAR}, 10,000 images, 156 steps of 64, rate 0.02; the number is the largest gradient norm over its median",
        (
            Pair("freeze_patch=True", "freeze_patch=False", JUMP, lower=True),
            Pair("freeze_patch=True", "freeze_patch=False", KNN),
        ),
    ),
    drloc(25),
    Claim(
        "proof_backbones",
        "The backbones that the next claim starts from; it compares nothing.",
        "8-pixel patches, CIFAR-10 without labels, 780 steps of 128, one seed",
        (),
    ),
    Claim(
        "proof_labels",
        "MoCo v3 and DINO: where few labels are there, pretraining without labels beats training from random weights.",
        "ViT of 4 blocks with 8-pixel patches, 2,500 labels of CIFAR-10, 190 steps of 128",
        (Pair("mocov3", "scratch", TOP1), Pair("dino", "scratch", TOP1)),
    ),
    Claim(
        "proof_regions",
        "EsViT: the loss on regions raises correspondence over the loss on views alone, also if it joins late.",
        f"{CIFAR}, 12,500 images, 194 steps of 128",
        (Pair("regions", "views", CORRESPONDENCE), Pair("regions_late", "views", CORRESPONDENCE)),
        ("correspondence",),
    ),
    Claim(
        "proof_patches",
        "SelfPatch: patches that agree with their neighbours raise dense accuracy over DINO.",
        "ViT of 4 blocks on crops of photographs, 64 pixels, 8 x 8 tokens, 8 epochs in batches of 64; "
        "J&F of the two sequences of DAVIS that no crop is from, at 240 pixels",
        (Pair("selfpatch", "dino", DAVIS),),
        ("davis",),
    ),
    Claim(
        "proof_mocov3",
        "MoCo v3, tables 2 to 5: positions matter little; batch norm in heads, predictor and momentum help.",
        f"{CIFAR}, 25,000 images, 195 steps of 128",
        tuple(Pair("whole", arm, KNN) for arm in ("no_positions", "no_norm", "no_predictor", "no_momentum")),
    ),
    Claim(
        "proof_rate",
        "MoCo v3, figures 1 and 2: too large a rate costs accuracy without an error of the loss.",
        f"{CIFAR}, 25,000 images, 195 steps of 128",
        (Pair("lr=0.004", "lr=0.016", KNN), Pair("lr=0.004", "lr=0.001", KNN)),
    ),
    Claim(
        "proof_frameworks",
        "MoCo v3, table 4: MoCo v3 is ahead of SimCLR, BYOL and SwAV on a ViT. MoBY, BYOL with regions and SelfPatch "
        "on MoBY are shown beside them.",
        f"{CIFAR}, 25,000 images, 195 steps of 128",
        tuple(Pair("mocov3", arm, KNN) for arm in ("simclr", "byol", "swav", "moby", "byol_regions", "selfpatch_moby")),
    ),
    Claim(
        "proof_curriculum",
        "Curriculum (FastDINOv2, PatchDropout): low resolution or fewer patches first save time at equal quality.",
        f"{CIFAR}, 7,500 images, 4 epochs in batches of 128",
        tuple(
            pair
            for arm in ("curriculum", "keep")
            for pair in (Pair(arm, "full", SECONDS, lower=True), Pair(arm, "full", KNN))
        ),
    ),
    drloc(10),
    drloc(50),
    drloc(100),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, help="time to train")
    parser.add_argument("--only", nargs="+", metavar="SWEEP", help="names of sweeps; all by default")
    parser.add_argument("--page", action="store_true", help="train nothing: write the page from the results")
    parser.add_argument("--davis", type=Path, default=Path("data/proof/DAVIS"), help="folder for the protocol davis")
    args = parser.parse_args()
    chosen = choose(args.only)
    if not args.page and (args.hours is None or args.hours <= 0):
        raise UserError(f"--hours {args.hours}: expected a time above 0, or --page")
    end, failed = time.monotonic() + 3600 * (args.hours or 0), list[str]()
    for claim in chosen:
        if not args.page and (left := end - time.monotonic()) > 0 and (status := train(claim, left / 3600)):
            failed.append(f"{claim.sweep} with status {status}")
        evaluate(claim, args.davis if not args.page else None)
        store(claim)
    write(read_lines(RESULTS))
    if failed:
        raise UserError(f"`eagleray tune` ended early: {', '.join(failed)}; its own line above says why")


def choose(names: Sequence[str] | None) -> list[Claim]:
    """Return the claims of these sweeps, in the order of their worth. Raises UserError."""
    known = [claim.sweep for claim in CLAIMS]
    for name in names or ():
        if name not in known:
            raise UserError(f"--only {name}: expected one of {', '.join(known)}")
    return [claim for claim in CLAIMS if names is None or claim.sweep in names]


def command(claim: Claim) -> str:
    """Return the command that repeats a claim's sweep, or continues it."""
    return f"eagleray tune {claim.sweep} out={RUNS}/{claim.sweep} --max-concurrent 1 --resume"


def train(claim: Claim, hours: float) -> int:
    """Run or continue the sweep of a claim for at most so many hours. Returns the exit status."""
    common.note(command(claim))
    words = [*command(claim).split()[1:], f"sweep.hours={hours:.4f}"]
    environment = os.environ | {"PYTHONPATH": str(common.ROOT / "platform"), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-m", "eagleray.cli", *words], env=environment, check=False).returncode


def evaluate(claim: Claim, davis: Path | None) -> None:
    """Apply the protocols of a claim to the trials that have ended and have no such numbers yet; none without
    `davis`, the folder of sequences."""
    for trial, _ in finished(claim):
        for protocol in claim.protocols if davis else ():
            results = trial / "results.json"
            if results.exists() and any(r["protocol"] == protocol for r in json.loads(results.read_text())):
                continue
            data = ["--davis", str(davis), "--split", "val_more", "--size", "240"]
            if protocol == "correspondence":
                data = ["--train", "data/proof/cifar10/train-{000000..000000}.tar"]
                data += ["--test", "data/proof/cifar10/test-{000000..000001}.tar"]
            words = ["-m", "eagleray.cli", "evaluate", str(trial), "--protocol", protocol, *data]
            environment = os.environ | {"PYTHONPATH": str(common.ROOT / "platform"), "OMP_NUM_THREADS": "1"}
            subprocess.run([sys.executable, *words], env=environment, check=False)


def finished(claim: Claim) -> list[tuple[Path, Mapping[str, Any]]]:
    """Return the folders and rows of the trials that took all their steps."""
    folder = RUNS / claim.sweep
    return [(folder / "trials" / r["id"], r) for r in read_lines(folder / "trials.jsonl") if r["state"] == "finished"]


def setting(row: Mapping[str, Any]) -> str:
    """Return the name of a trial's setting: its alternative and its values without the seed."""
    parts = {k.removesuffix(".value").rpartition(".")[2]: v for k, v in row["values"].items() if k != "seed"}
    return " ".join(filter(None, [row["alternative"], *(f"{k}={v}" for k, v in parts.items())]))


def jump(trial: Path) -> float:
    """Return the largest gradient norm of a run over the median of the steps before it."""
    norms = [r["grad_norm"] for r in read_lines(trial / "steps.jsonl")]
    return max(norms[i] / statistics.median(norms[max(0, i - HISTORY) : i]) for i in range(WARM, len(norms)))


def store(claim: Claim) -> None:
    """Put the trials of a claim that have ended into the results, each once."""
    lines = {(r["claim"], r["setting"], r["seed"]): r for r in read_lines(RESULTS)}
    wanted = {p.metric for p in claim.pairs} | {KNN, TOP1}
    for trial, row in finished(claim):
        numbers = json.loads((trial / "summary.json").read_text())
        if (trial / "results.json").exists():
            for result in json.loads((trial / "results.json").read_text()):
                numbers |= result["numbers"]
        if JUMP in wanted:
            numbers[JUMP] = jump(trial)
        kept = {k: round(numbers[k], 4) for k in sorted(wanted) if k in numbers}
        name, seed = setting(row), row["values"]["seed"]
        lines[claim.sweep, name, seed] = {"claim": claim.sweep, "setting": name, "seed": seed, "numbers": kept}
    RESULTS.write_text("".join(json.dumps(r) + "\n" for r in lines.values()))


def of(lines: Sequence[Mapping[str, Any]], sweep: str, name: str, metric: str) -> dict[int, float]:
    """Return the numbers of a setting by seed."""
    mine = [r for r in lines if (r["claim"], r["setting"]) == (sweep, name)]
    return {r["seed"]: r["numbers"][metric] for r in mine if metric in r["numbers"]}


def verdict(better: Sequence[float], worse: Sequence[float], *, lower: bool) -> str:
    """Return whether the first setting is better: seen, reversed, not seen or undecided. Means must differ by more than
    both deviations together; where they do not, MOST seeds of each are needed to say that nothing is seen."""
    least = min(len(better), len(worse))
    if least < LEAST:
        return "undecided"
    gain = statistics.mean(better) - statistics.mean(worse)
    gain = -gain if lower else gain
    if abs(gain) > statistics.stdev(better) + statistics.stdev(worse):
        return "seen" if gain > 0 else "reversed"
    return "not seen" if least >= MOST else "undecided"


def words(values: Sequence[float]) -> str:
    """Return mean, deviation and number of seeds, or a dash."""
    if not values:
        return "-"
    deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{deviation} ({len(values)})"


HEAD = """# Proof on real images

Written by `python benchmarks/proof.py`. For each claim of a paper this page says what we saw at a size that fits two
CPU cores. "Seen" means that the means differ by more than both standard deviations together, with at least three
seeds of each; "reversed" that they do so the other way round; "not seen" that they do not with five seeds; all else
is "undecided". Fewer than three seeds decide nothing. The machine was shared with other programs, so times say
little; a trial's other numbers do not depend on them. Numbers are means ± standard deviations over seeds (number of
seeds), in percent unless said otherwise. Each number of each trial is in
[proof.jsonl](../benchmarks/results/proof.jsonl).

`python benchmarks/proof_set.py SOURCE` prepares the images below `data/proof`, and this continues all sweeps for an
hour and writes the page anew:

```
python benchmarks/proof.py --hours 1
```

## The images

| Images | Used for | Terms |
| --- | --- | --- |
| CIFAR-10, 50,000 + 10,000 of 32 pixels | all claims but SelfPatch's | no licence stated by its authors; research |
| crops of 500 ImageNet photographs, 28 CamVid and 16 DAVIS frames | SelfPatch | research only; CamVid CC BY-NC 4.0 |
| Food-101 at 64 pixels, 1,212 + 505 | no claim yet | research only |
"""


def section(claim: Claim, lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the section of a claim."""
    text = f"\n## {claim.sweep}\n\n{claim.claim}\n\n* Setting: {claim.setting}.\n* Tried: {claim.tried}.\n"
    text += f"* Command: `{command(claim)}`\n\n"
    if not any(r["claim"] == claim.sweep for r in lines):
        return text + "Not run yet.\n"
    if claim.pairs:
        text += "| said to be better | number | than | number | measure | verdict |\n" + 6 * "| --- " + "|\n"
    for pair in claim.pairs:
        a, b = (list(of(lines, claim.sweep, n, pair.metric).values()) for n in (pair.better, pair.worse))
        text += f"| `{pair.better}` | {words(a)} | `{pair.worse}` | {words(b)} | `{pair.metric}` "
        text += f"| {verdict(a, b, lower=pair.lower)} |\n"
    return text + f"\n![Each seed of {claim.sweep}](images/proof/{claim.sweep}.png)\n"


def draw(claim: Claim, lines: Sequence[Mapping[str, Any]]) -> None:
    """Draw each seed of each setting of a claim, by measure."""
    mine = [r for r in lines if r["claim"] == claim.sweep]
    metrics = sorted({k for r in mine for k in r["numbers"]})
    names = list(dict.fromkeys(r["setting"] for r in mine))
    figure, axes = plt.subplots(1, len(metrics), figsize=(4.2 * len(metrics), 0.7 + 0.4 * len(names)), squeeze=False)
    for ax, metric in zip(axes[0], metrics, strict=True):
        for y, name in enumerate(names):
            values = list(of(lines, claim.sweep, name, metric).values())
            ax.plot(values, [y] * len(values), "o", color=BLUE, alpha=0.6)
            if values:
                ax.plot([statistics.mean(values)], [y], "|", color=GREY, ms=16)
        ax.set_yticks(range(len(names)), names)
        ax.set_ylim(len(names) - 0.5, -0.5)
        ax.set_xlabel(metric)
    figure.savefig(IMAGES / f"{claim.sweep}.png", dpi=DPI, bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)


def page(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the page for these results."""
    return HEAD + "".join(section(claim, lines) for claim in CLAIMS)


def write(lines: Sequence[Mapping[str, Any]]) -> None:
    """Write the page and its plots."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    for claim in CLAIMS:
        if any(r["claim"] == claim.sweep for r in lines):
            draw(claim, lines)
    PAGE.write_text(page(lines))


if __name__ == "__main__":
    common.run(main)
