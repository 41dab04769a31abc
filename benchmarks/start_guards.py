"""What becomes of a start: pretraining goes on from a trained backbone at a rate that is meant for random weights, and
at the same rate with guards, on the data of the start and on other data.

    python benchmarks/start_guards.py [--seeds 3] [--epochs 6] [--steps 390] [--rate 0.004] [--out runs/start_guards]
        [--json]

One run of MoCo v3 on CIFAR-10 (`--epochs`) is the start. From its backbone alone, so with fresh heads, other runs take
`--steps` steps on CIFAR-10 and on MNIST: `plain`; `guarded`, with `start.freeze`, `start.anchor` and
`optim.layer_decay`; `stopped`, plain with `start.stop_below=0.9`. What is done already is read from `--out`.

before, after, of_best         kNN top-1 in percent among the guard's training images: at the start, at the end, and at
                               the best checkpoint that is kept; mean and deviation over seeds
found_at, lost_by_then         step of the finding `start lost`, and the share of the whole loss of kNN by then
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
from eagleray.runs import layout
from eagleray.runs.health import LOST_START
from eagleray.runs.metrics import START_KNN

LOST = "lost.txt"  # why a run ended early
RECIPE = "mocov3_vitxs8_cifar10_ep2"
ARMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "guarded": {"start.freeze": 0.25, "start.anchor": 10.0, "optim.layer_decay": 0.5},
    "stopped": {"start.stop_below": 0.9},
}
MINE = {"workers": 0, "evaluate.limit": 2000, "evaluate.probe_epochs": 0, "monitor.every": 16}


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder with cifar10/ and transfer/mnist/")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=6, help="of the start")
    parser.add_argument("--steps", type=int, default=390)
    parser.add_argument("--rate", type=float, default=0.004)
    parser.add_argument("--out", type=Path, default=Path("runs/start_guards"))
    args = parser.parse_args()
    cifar, mnist = args.data / "cifar10", args.data / "transfer" / "mnist"
    start = args.out / "start"
    pretrain(start, cifar, {"optim.epochs": args.epochs})
    result: dict[str, Any] = {"rate": args.rate, "steps": args.steps}
    for name, data, images in ("cifar10", cifar, 50_000), ("mnist", mnist, 1_500):
        for arm, keys in ARMS.items():
            rows = []
            for seed in range(args.seeds):
                out = args.out / f"{name}-{arm}-{seed}"
                steps = images // 128
                more = {"start.from": str(start), "optim.epochs": -(-args.steps // steps), "max_steps": args.steps}
                rate = {"optim.lr": {"value": args.rate, "warmup": 0.0, "end": 0.0}, "seed": seed}
                pretrain(out, data, more | rate | keys)
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
    first = json.loads((out / layout.START_SCORES).read_text())[START_KNN]
    curve = {line["step"]: line[START_KNN] for line in read_lines(out / layout.METRICS) if START_KNN in line}
    kept = [int(file.stem.removeprefix("step-")) for file in (out / layout.CHECKPOINTS).glob("step-*.pt")]
    after = curve[max(curve)]
    row = {"before": first, "after": after, "of_best": max([curve.get(step, first) for step in kept], default=after)}
    found = [line["step"] for line in read_lines(out / layout.HEALTH) if line["kind"] == LOST_START]
    if found and after < first:
        row |= {"found_at": found[0], "lost_by_then": (first - curve[found[0]]) / (first - min(curve.values()))}
    return row


def summed(rows: list[dict[str, float]]) -> Iterator[tuple[str, Any]]:
    """Yield mean and deviation over seeds of every number, and of how many runs it is where not all have it."""
    for key in ("before", "after", "of_best", "found_at", "lost_by_then"):
        values = [row[key] for row in rows if key in row]
        if values:
            yield key, round(statistics.mean(values), 2)
            yield f"{key}_deviation", round(statistics.pstdev(values), 2)
            yield f"{key}_runs", len(values)


if __name__ == "__main__":
    common.run(main)
