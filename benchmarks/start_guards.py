"""What becomes of a start: pretraining goes on from a trained backbone at a rate that is meant for random weights, and
at the same rate with guards, on the data of the start and on other data.

    python benchmarks/start_guards.py --data DATA [--seeds 3] [--epochs 6] [--steps 390] [--rate 0.03]
        [--only cifar10-plain ...] [--out runs/start_guards] [--json]

One run of MoCo v3 on CIFAR-10 (`--epochs`) is the start. From its backbone alone, so with fresh heads, other runs take
`--steps` steps on CIFAR-10 and on MNIST: `plain`; `guarded`, with `start.freeze` for the first quarter of the steps,
`start.anchor` and `optim.layer_decay`; `stopped`, plain with `start.stop_below=0.9`. What is done already is read from
`--out`.

before, after                  kNN top-1 in percent on test images, by the evaluation of the run: of the start, and at
                               the end of a run that was not stopped; mean and deviation over seeds
seen_before, seen_best         kNN top-1 in percent among the guard's training images: at the start, and at the best
                               checkpoint that is kept
found_at, lost_by_then         step of the finding `start lost`, and the share of the whole loss of kNN among the
                               guard's images by then
"""

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common

import eagleray
from eagleray.base.errors import UserError
from eagleray.base.files import read_lines
from eagleray.data.index import open_index
from eagleray.runs import layout
from eagleray.runs.health import LOST_START
from eagleray.runs.metrics import AT_START, KNN_TOP1, START_KNN

LOST = "lost.txt"  # why a run ended early
RECIPE = "mocov3_vitxs8_cifar10_ep2"
ARMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "guarded": {"start.anchor": 10.0, "optim.layer_decay": 0.35},
    "stopped": {"start.stop_below": 0.9},
}
FROZEN = 0.25  # share of the steps in which the guarded runs train heads alone
WARMUP = 0.02  # share of the steps in which the rate rises
BATCH = 128  # of the recipe
# A line for every step, as one has the newest measurement alone.
MINE = {"workers": 0, "evaluate.limit": 2000, "evaluate.probe_epochs": 0, "monitor.every": 16, "log_steps": 1}


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with cifar10/ and transfer/mnist/")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=6, help="of the start")
    parser.add_argument("--steps", type=int, default=390)
    parser.add_argument("--rate", type=float, default=0.03)
    parser.add_argument("--only", nargs="+", metavar="SET-ARM", help="some of the runs, such as cifar10-plain")
    parser.add_argument("--out", type=Path, default=Path("runs/start_guards"))
    args = parser.parse_args()
    cifar, mnist = args.data / "cifar10", args.data / "transfer" / "mnist"
    start = args.out / "start"
    pretrain(start, cifar, {"optim.epochs": args.epochs})
    result: dict[str, Any] = {"rate": args.rate, "steps": args.steps}
    for name, data in ("cifar10", cifar), ("mnist", mnist):
        epoch = len(open_index([f"{data}/train-*.tar"])) // BATCH  # steps
        for arm, keys in ARMS.items():
            if args.only and f"{name}-{arm}" not in args.only:
                continue
            frozen = {"start.freeze": FROZEN * args.steps / epoch} if arm == "guarded" else {}
            length = {"optim.epochs": -(-args.steps // epoch), "max_steps": args.steps}
            rate = {"optim.lr": {"value": args.rate, "warmup": WARMUP * args.steps / epoch, "end": 0.0}}
            rows = []
            for seed in range(args.seeds):
                out = args.out / f"{name}-{arm}-{seed}"
                pretrain(out, data, {"start.from": str(start), "seed": seed} | length | rate | frozen | keys)
                rows.append(outcome(out))
                common.note(f"{out.name}: {rows[-1]}")
            result |= {f"{name}_{arm}_{key}": value for key, value in summed(rows)}
    common.show(result, as_json=args.json)


def pretrain(out: Path, data: Path, keys: dict[str, Any]) -> None:
    """Take the steps of a run, if it has not ended before."""
    if (out / layout.SUMMARY).exists() or (out / LOST).exists():
        return
    places = {"data.train": f"{data}/train-*.tar", "data.test": f"{data}/test-*.tar"}
    try:
        if not eagleray.pretrain(RECIPE, places | MINE | keys, out=out).finished:
            raise SystemExit(130)  # interrupted
    except UserError as e:
        if "start.stop_below" not in str(e):
            raise
        (out / LOST).write_text(str(e))


def outcome(out: Path) -> dict[str, float]:
    """Return the numbers of one run."""
    scores = json.loads((out / layout.START_SCORES).read_text())
    seen = {0: scores[START_KNN]}
    seen |= {line["step"]: line[START_KNN] for line in read_lines(out / layout.METRICS) if START_KNN in line}
    kept = [int(file.stem.removeprefix("step-")) for file in (out / layout.CHECKPOINTS).glob("step-*.pt")]
    row = {"before": scores[KNN_TOP1], "seen_before": seen[0]}
    row["seen_best"] = max(seen[step] for step in kept if step in seen)
    if (out / layout.SUMMARY).exists():
        summary = json.loads((out / layout.SUMMARY).read_text())
        row |= {"before": summary[KNN_TOP1 + AT_START], "after": summary[KNN_TOP1]}
    found = [line["step"] for line in read_lines(out / layout.HEALTH) if line["kind"] == LOST_START]
    if found:
        row |= {"found_at": found[0], "lost_by_then": (seen[0] - seen[found[0]]) / (seen[0] - min(seen.values()))}
    return row


def summed(rows: list[dict[str, float]]) -> Iterator[tuple[str, Any]]:
    """Yield mean and deviation over seeds of every number, and of how many runs it is where not all have it."""
    for key in ("before", "after", "seen_before", "seen_best", "found_at", "lost_by_then"):
        values = [row[key] for row in rows if key in row]
        if values:
            yield key, round(statistics.mean(values), 2)
            yield f"{key}_deviation", round(statistics.pstdev(values), 2)
            yield f"{key}_runs", len(values)


if __name__ == "__main__":
    common.run(main)
