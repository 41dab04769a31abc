"""Does a run say what is wrong with it? Eight ways to break a run, and a healthy run of each method that needs
neither labels nor another run, each some hundred steps of a small ViT: what `health.py` named, and when.

    python benchmarks/faults.py [--data SHARDS] [--steps 200] [--only NAME ...] [--json]

Without --data, pictures are drawn. Prints a table, or one JSON object a line."""

import argparse
import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import common
import torch
from torch import Tensor

from eagleray import config
from eagleray.base.errors import UserError
from eagleray.base.files import read_lines
from eagleray.cli.demo import pictures
from eagleray.config import bundled
from eagleray.config.schedule import Progress
from eagleray.data.batch import Batch
from eagleray.datasets.shards import write_shards
from eagleray.engine.loop import Step, Trainer
from eagleray.engine.world import local
from eagleray.methods import simsiam
from eagleray.runs import pretrain, recipe, start
from eagleray.runs.build import build_method
from eagleray.runs.health import AT_END
from eagleray.runs.sources import resolve_paths
from eagleray.runs.tracking import Tracking

SMALL = "_vitxs8_cifar10_ep2"  # the recipes of two CPU cores
LEFT_OUT = ("distill", "supervised")  # whose small recipes need another run, and the ten classes of CIFAR-10
SPOIL = {
    "same views": lambda v: [v[0], v[0].clone(), *v[2:]],
    "wrong normalisation": lambda v: [x * 57 + 120 for x in v],  # pixels from 0 to 255
}


@dataclass(frozen=True)
class Fault:
    """A way to break a run, and the findings of `health.KINDS` any of which names it."""

    method: str
    named: tuple[str, ...]
    keys: tuple[str, ...] = ()  # overrides of the recipe
    factor: tuple[str, float] | None = None  # a key times this
    spoil: str | None = None  # what becomes of the batches
    patched: Callable[[], Any] | None = None


def with_gradient(p: Tensor, z: Tensor) -> Tensor:
    return -torch.nn.functional.cosine_similarity(p, z, dim=1).mean()


@contextmanager
def half_gradients(scale: float) -> Iterator[None]:
    """Gradients pass through half precision under a loss scale that is too large for some of them."""

    def overflowing(*args: Any) -> Any:
        method = build_method(*args)
        for p in method.parameters():
            if p.requires_grad:
                p.register_hook(lambda g: (g * scale).half().float() / scale)
        return method

    with patch.object(start, "build_method", overflowing):
        yield


FAULTS = {
    "lr x 30": Fault("mocov3", ("too large steps", "spike", "non-finite"), factor=("optim.lr.value", 30)),
    "momentum 0": Fault("byol", ("no momentum",), ("method.momentum={value: 0.0, end: null}",)),
    "no stop-gradient": Fault("simsiam", ("collapse",), patched=lambda: patch.object(simsiam, "D", with_gradient)),
    "no centring": Fault("dino", ("collapse",), ("method.center_momentum=1.0",)),
    "wrong normalisation": Fault("simclr", ("inputs",), spoil="wrong normalisation"),
    "duplicated views": Fault("moco", ("same views",), spoil="same views"),
    "fp16-like overflow": Fault("mocov3", ("non-finite",), patched=lambda: half_gradients(2.0**16)),
    "temperature x 20": Fault(
        "dino", ("uniform output",), ("method.teacher_temp={value: 0.8}", "method.student_temp=2.0")
    ),
}


@contextmanager
def spoiled(how: str) -> Iterator[None]:
    step = Trainer.step

    def spoil(self: Trainer, at: Progress, batch: Batch) -> Step:
        return step(self, at, replace(batch, views=SPOIL[how](batch.views)))

    with patch.object(Trainer, "step", spoil):
        yield


def cases() -> dict[str, Fault]:
    """All there are by name, the healthy runs of all methods but those of LEFT_OUT last."""
    methods = [name.removesuffix(SMALL) for name in bundled.names() if name.endswith(SMALL)]
    return FAULTS | {f"healthy {method}": Fault(method, ()) for method in methods if method not in LEFT_OUT}


def trained(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One run, and what it said of itself."""
    torch.set_num_threads(1)
    fault = cases()[name]
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        if fault.spoil:
            stack.enter_context(spoiled(fault.spoil))
        if fault.patched:
            stack.enter_context(fault.patched())
        keys = [f"data.train={args.data}", f"out={scratch}/run", f"max_steps={args.steps}", "data.lanes=8", "workers=0"]
        keys += ["optim.batch=64", "monitor.every=10", "evaluate.limit=256", "evaluate.probe_epochs=0"]
        r = recipe.load(fault.method + SMALL, keys + list(fault.keys))
        if fault.factor:
            value = config.flatten(config.to_plain(r))[fault.factor[0]] * fault.factor[1]
            r = recipe.load(fault.method + SMALL, [*keys, *fault.keys, f"{fault.factor[0]}={value}"])
        r, out = resolve_paths(r), Path(scratch) / "run"
        out.mkdir()
        stopped = None
        try:
            pretrain.pretrain(r, local(), tracking=Tracking(args.tracking))
        except UserError as e:
            stopped = str(e)
        # So few steps need not end above the untrained backbone.
        found = [f for f in read_lines(out / "health.jsonl") if f["kind"] not in AT_END]
        if args.keep:
            (args.keep / f"{name.replace(' ', '-')}.jsonl").write_text((out / "metrics.jsonl").read_text())
    kinds = list(dict.fromkeys(f["kind"] for f in found))
    first = next((f for f in found if f["kind"] in fault.named), None)
    right = first is not None if fault.named else not (found or stopped)
    said = first["text"] if first else "; ".join(f"step {f['step']}: {f['text']}" for f in found)
    return {
        "case": name,
        "method": fault.method,
        "named": kinds,
        "right": right,
        "step": first and first["step"],
        "said": said,
        "stopped": stopped,
    }


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--data", help="labelled shards; drawn pictures where it is missing")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", nargs="*", help="names of faults, or of methods for their healthy runs")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--keep", type=Path, help="folder for the metrics of every run")
    args = parser.parse_args()
    names = [name for name in cases() if not args.only or name.removeprefix("healthy ") in args.only]
    with tempfile.TemporaryDirectory() as folder:
        args.tracking = f"sqlite:///{folder}/mlflow.db"  # one for all: making it takes seconds
        if not args.data:
            args.data = f"{folder}/drawn"
            write_shards(pictures(0, 4000), args.data, size=2**20)
        with ProcessPoolExecutor(args.processes, multiprocessing.get_context("spawn")) as pool:
            for row in pool.map(partial(trained, args=args), names):
                show(row, as_json=args.json)


def show(row: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(row | {"commit": common.machine()["commit"]}), flush=True)
        return
    mark = "ok   " if row["right"] else "WRONG"
    print(
        f"{mark} {row['case']:<24} {row['method']:<14} {', '.join(row['named']) or 'nothing':<32} {row['said']}",
        flush=True,
    )


if __name__ == "__main__":
    common.run(main)
