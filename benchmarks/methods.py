"""Run a whole `pretrain` of every method on the device there is, and report which methods failed.

Each run is tiny: it trains, logs, monitors itself and saves, stops half way, continues, evaluates with labels and
exports. What is measured is whether that works, not how fast it is.

status          `ok`, or the error in one line
seconds         of the whole run, its start and end included
loss            mean of the last logged steps
knn             top-1 accuracy of the last evaluation, in %
"""

import itertools
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import common
import synthetic
import torch
import torch.distributed as td
import torch.multiprocessing as mp

from eagleray.engine.world import World, local
from eagleray.runs import pretrain, recipe
from eagleray.runs.sources import resolve_paths
from eagleray.runs.tracking import tracking_of

common.sys.path.insert(0, str(common.ROOT / "tests"))

from helpers.recipes import METHODS, small_recipe  # noqa: E402

STEPS = 12


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("keys", nargs="*", metavar="key=value", help="keys of every recipe, such as precision=fp16")
    parser.add_argument("--methods", nargs="+", choices=sorted(METHODS), default=sorted(METHODS), metavar="NAME")
    parser.add_argument("--ranks", type=int, default=1, help="processes, each with a device of its own")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, all on one device")
    args = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as folder:
        synthetic.write(Path(folder, "shards"), images=96, distinct=24, width=40, height=32, each=48, classes=20)
        result = run_all(args.methods, args.keys, Path(folder), args.ranks, min(args.jobs, len(args.methods)))
    common.show({"methods": result, "ranks": args.ranks}, as_json=args.json)
    if any(row["status"] != "ok" for row in result.values()):
        raise SystemExit(1)


def run_all(
    methods: Sequence[str], keys: Sequence[str], folder: Path, ranks: int, jobs: int
) -> dict[str, dict[str, Any]]:
    """Return the result of every method. With several ranks, each is a process of this machine."""
    if ranks > 1:
        mp.spawn(run_rank, (ranks, methods, keys, folder), ranks)  # type: ignore[no-untyped-call]
        out: dict[str, dict[str, Any]] = json.loads((folder / "result.json").read_text())
        return out
    if jobs == 1:
        return {name: run_one(name, keys, folder) for name in methods}
    with ThreadPoolExecutor(jobs) as pool:
        return dict(zip(methods, pool.map(run_alone, methods, itertools.repeat(keys)), strict=True))


def run_alone(name: str, keys: Sequence[str]) -> dict[str, Any]:
    """Return the result of one method that runs in a program of its own, as a process that `multiprocessing` starts
    lets each worker of a loader import PyTorch again."""
    command = [sys.executable, __file__, "--json", "--methods", name, "--", *keys]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    lines = done.stdout.splitlines()
    if not lines:
        return {"status": f"ended with status {done.returncode}"}
    row: dict[str, Any] = json.loads(lines[-1])["methods"][name]
    return row


def run_one(name: str, keys: Sequence[str], folder: Path) -> dict[str, Any]:
    """Return the result of one method on one rank; its error is a part of the result."""
    logging.disable(logging.WARNING)
    begin = time.perf_counter()
    try:
        row = {"status": "ok", **run_method(name, keys, folder, local())}
    except Exception as e:
        traceback.print_exc()
        row = {"status": f"{type(e).__name__}: {' '.join(str(e).split())}"[:300]}
    return timed(name, row, begin)


def timed(name: str, row: dict[str, Any], begin: float) -> dict[str, Any]:
    seconds = round(time.perf_counter() - begin, 2)
    common.note(f"{name}: {row['status']}, {seconds} s")
    return row | {"seconds": seconds}


def run_rank(rank: int, ranks: int, methods: Sequence[str], keys: Sequence[str], folder: Path) -> None:
    """Run every method on one of several ranks; rank 0 writes the results."""
    logging.disable(logging.WARNING)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ.get("MASTER_PORT", "29511")}
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
    td.init_process_group("nccl" if torch.cuda.is_available() else "gloo", rank=rank, world_size=ranks)
    world, result = local(), {}
    for name in methods:
        begin = time.perf_counter()
        row = {"status": "ok", **run_method(name, keys, folder, world)}  # raises: the other ranks wait for it
        if rank == 0:
            result[name] = timed(name, row, begin)
    if rank == 0:
        (folder / "result.json").write_text(json.dumps(result))
    td.destroy_process_group()


def run_method(name: str, keys: Sequence[str], folder: Path, world: World) -> dict[str, float]:
    """Train half of the steps, continue to the end, and return the last loss and kNN accuracy."""
    file = folder / f"{name}.yaml"
    if world.rank == 0:
        file.write_text(small_recipe(name))
    if world.size > 1:
        td.barrier()
    shards = [f"data.train={folder / 'shards'}", f"data.test={folder / 'shards'}", f"out={folder / name}"]
    every = [
        "monitor.every=2",
        "checkpoint.steps=4",
        "data.workers=1",
        f"workers={world.size if world.size > 1 else 0}",
    ]
    for steps in (STEPS // 2, STEPS):
        chosen = resolve_paths(recipe.load(str(file), [*shards, *every, "optim.epochs=8", f"max_steps={steps}", *keys]))
        summary = pretrain.pretrain(chosen, world, tracking=tracking_of(folder / name)) or {}
        assert summary, f"{name} stopped before step {steps}"
    if world.rank != 0:
        return {}
    assert list((folder / name / "export").iterdir()), f"{name} exported nothing"
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == STEPS, f"{name} logged {lines[-1]['step']} of {STEPS} steps"
    knn = {"knn": summary["knn/top1"]} if "knn/top1" in summary else {}
    return {"loss": lines[-1]["loss"]} | knn


if __name__ == "__main__":
    common.run(main)
