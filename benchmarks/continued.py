"""What becomes of pretrained weights that are continued on other images: by a method's own defaults, by a recipe
`continue_*` with its adapters, and by the same with all weights.

    python benchmarks/continued.py --data DATA [--start docs/vit] [--seeds 3] [--steps 80] [--only SET-ARM ...]
        [--out runs/continued] [--json]

The start is the small ViT of this repository. On MNIST and on the faces of FER2013, runs take `--steps` steps of the
recipe `continue_vitxs8` (`adapters`), without its adapters but at layer-wise rates (`all`), and without heads first,
adapters, anchor, guard and return to the best checkpoint, as in simclr_vitxs8_cifar10_ep2 (`defaults`). `fast` and
`fast-adapters` have 15 times the rate of `defaults` and `adapters`. Training heads alone leaves the start as it is.
What is done already is read from `--out`.

knn, linear                    top-1 in percent on test images: mean over seeds of the start and of the end; the
                               deviation of the end
exported                       steps of the weights that are exported, one for each seed
seconds, mib                   CPU seconds of a run with its evaluations, and its peak of memory in MiB: means
"""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import common

from eagleray.runs import layout
from eagleray.runs.metrics import AT_START, KNN_TOP1, LINEAR_TOP1
from eagleray.runs.summary import EXPORTED

RECIPE = "continue_vitxs8"
OFF = ("start.freeze=0", "start.anchor=0", "start.stop_below=null", "start.keep_best=false")
FAST = "optim.lr.value=0.03"
ARMS = {
    "defaults": ("backbone.lora=null", *OFF),
    "fast": ("backbone.lora=null", *OFF, FAST),
    "fast-adapters": (FAST,),
    "adapters": (),
    "all": ("backbone.lora=null", "optim.layer_decay=0.65"),
}
COST = "cost.json"


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with transfer/fer2013/ and transfer/mnist/")
    parser.add_argument("--start", default="docs/vit")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--only", nargs="+", metavar="SET-ARM", help="some of the runs, such as mnist-adapters")
    parser.add_argument("--out", type=Path, default=Path("runs/continued"))
    args = parser.parse_args()
    result: dict[str, Any] = {"steps": args.steps}
    for name in "mnist", "fer2013":
        data = args.data / "transfer" / name
        for arm, keys in ARMS.items():
            if args.only and f"{name}-{arm}" not in args.only:
                continue
            rows = []
            for seed in range(args.seeds):
                out = args.out / f"{name}-{arm}-{seed}"
                places = f"data.train={data}/train-*.tar", f"data.test={data}/test-*.tar", f"out={out}"
                run(out, f"start.from={args.start}", f"max_steps={args.steps}", f"seed={seed}", *places, *keys)
                rows.append(outcome(out))
                common.note(f"{out.name}: {rows[-1]}")
            result |= {f"{name}_{arm}_{key}": value for key, value in summed(rows).items()}
    common.show(result, as_json=args.json)


def run(out: Path, *keys: str) -> None:
    """Take the steps of a run in a process of its own, if it has not ended before, and write down what it costs."""
    if (out / COST).exists():
        return
    process = subprocess.Popen([sys.executable, "-m", "eagleray.cli", "pretrain", RECIPE, "optim.epochs=1000", *keys])
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(130)  # interrupted, or it has said why
    (out / COST).write_text(json.dumps({"seconds": usage.ru_utime + usage.ru_stime, "mib": usage.ru_maxrss / 1024}))


def outcome(out: Path) -> dict[str, float]:
    """Return the numbers of one run."""
    summary, row = json.loads((out / layout.SUMMARY).read_text()), json.loads((out / COST).read_text())
    for name, key in ("knn", KNN_TOP1), ("linear", LINEAR_TOP1):
        row |= {f"{name}_start": summary[key + AT_START], name: summary[key]}
    return row | {"exported": summary.get(EXPORTED, summary["steps"])}


def summed(rows: list[dict[str, float]]) -> dict[str, Any]:
    """Return means over seeds, the deviations of scores, and the steps that are exported."""
    mean = {key: round(statistics.mean(row[key] for row in rows), 2) for key in rows[0] if key != "exported"}
    spread = {f"{key}_deviation": round(statistics.pstdev(row[key] for row in rows), 2) for key in ("knn", "linear")}
    return mean | spread | {"exported": [row["exported"] for row in rows]}


if __name__ == "__main__":
    common.run(main)
