"""Measure how well LeJEPA's loss ranks settings by the kNN accuracy that they reach.

    python benchmarks/lejepa.py --data DATA [--hours H] [--programs N] [--keys KEY=VALUE ...]

DATA has CIFAR-10 as benchmarks/proof_set.py prepares it. Runs or continues the twelve trials of the sweep
`cifar10_lejepa` for H hours (3), N side by side (2), each as a program of its own, so that Ray is not needed. Prints
the rank correlations (Spearman) of kNN accuracy with the negative loss, and with the negative loss over lambda^0.4
(arXiv:2511.08544, equation 8), and draws docs/images/lejepa_loss.png. It takes about 40 minutes of two CPU cores.
Ctrl-C or SIGTERM ends all trials with a checkpoint; the same command continues.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import common
import proof
from proof_claims import Claim

from eagleray.base.errors import UserError
from eagleray.base.files import read_lines
from eagleray.sweeps.sweep import count_trials, load

SWEEP = "cifar10_lejepa"
RESULTS = common.ROOT / "benchmarks" / "results" / "lejepa_cpu.json"
IMAGE = common.ROOT / "docs" / "images" / "lejepa_loss.png"
LAST = 0.2  # share of the lines of a run's log whose mean loss counts, as one step's loss is noisy
POWER = 0.4  # of lambda, in equation 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with CIFAR-10 in cifar10/")
    parser.add_argument("--hours", type=float, default=3.0, help="time to train")
    parser.add_argument("--programs", type=int, default=2, metavar="N", help="trials at a time")
    parser.add_argument("--keys", nargs="+", default=[], metavar="KEY=VALUE", help="of every recipe")
    args = parser.parse_args()
    images = args.data / "cifar10"
    if not images.is_dir():
        raise UserError(f"--data {args.data}: expected a folder with cifar10/, as proof_set.py prepares it")
    keys = [f"data.train={images}/train-{{000000..000019}}.tar", f"data.test={images}/test-{{000000..000003}}.tar"]
    claim, clock = Claim(SWEEP, "", "", ()), proof.Clock(3600 * args.hours)
    with clock.ended_by_signals():
        failed = proof.Programs([claim], clock, [*keys, "workers=0", *args.keys]).run(args.programs)
    if clock.stopped:
        sys.exit(130)
    if failed:
        raise UserError(f"ended early: {', '.join(failed)}; their own lines above say why")
    trials = [trial(folder, row["values"]) for folder, row in proof.finished(claim)]
    if len(trials) < (wanted := count_trials(load(SWEEP))):
        raise UserError(
            f"--hours {args.hours}: {len(trials)} of {wanted} trials have ended; the same command continues"
        )
    result = {"trials": len(trials), **correlations(trials)}
    RESULTS.write_text(json.dumps({**result, "settings": trials, "machine": common.machine()}, indent=1) + "\n")
    draw(trials)
    common.show(result, as_json=False)


def trial(folder: Path, values: dict[str, Any]) -> dict[str, float]:
    """Return lambda, the rate, the mean loss of the last lines of the log, and the kNN accuracy of a trial."""
    losses = [r["loss"] for r in read_lines(folder / "metrics.jsonl") if "loss" in r]
    last = losses[-max(1, round(LAST * len(losses))) :]
    summary = json.loads((folder / "summary.json").read_text())
    weight, rate = values["method.weight"], values["optim.lr.value"]
    loss = sum(last) / len(last)
    return {"lambda": weight, "lr": rate, "loss": loss, "scaled": loss / weight**POWER, "knn": summary["knn/top1"]}


def correlations(trials: list[dict[str, float]]) -> dict[str, float]:
    """Return the rank correlations of accuracy with low loss and with low scaled loss."""
    import pandas as pd

    table = pd.DataFrame(trials).corr("spearman")["knn"]
    return {"rank correlation, loss": -table["loss"], "rank correlation, scaled loss": -table["scaled"]}


def draw(trials: list[dict[str, float]]) -> None:
    """Draw the accuracy of each trial over its loss and its scaled loss, a colour for each lambda."""
    from matplotlib import pyplot as plt

    from eagleray.base.plotting import DPI

    plt.switch_backend("Agg")
    figure, axes = plt.subplots(1, 2, figsize=(8.4, 3.4), sharey=True)
    for ax, key, label in zip(axes, ("loss", "scaled"), ("loss", "loss / λ^0.4"), strict=True):
        for weight in sorted({t["lambda"] for t in trials}):
            mine = [t for t in trials if t["lambda"] == weight]
            ax.plot([t[key] for t in mine], [t["knn"] for t in mine], "o", label=f"λ = {weight:g}")
        ax.set_xlabel(label)
    axes[0].set_ylabel("kNN accuracy, %")
    axes[1].legend()
    figure.savefig(IMAGE, dpi=DPI, bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)


if __name__ == "__main__":
    common.run(main)
