"""Images per second, memory and where the time of a training step goes, for a recipe.

The method, the optimiser and the loop are those of `eagleray pretrain`; the calls inside the loop are timed where they
are, with events on a GPU, so that nothing waits for a clock. Steps are taken as if in the middle of training.

images_per_s        of this process, over all measured steps
step_ms             mean
forward_ms, backward_ms, clip_ms, optimizer_ms, ema_ms      its parts
rest_ms             what is left of it: on a CPU the wait for data too, on a GPU whatever keeps the device from working
data_wait           share of the time for which the loop, not the device, waited for its next batch
peak_memory_mib     on a GPU what tensors took at most; on a CPU what the process did, program and data included
planned_memory_mib  what `eagleray plan` predicts of the tensors
tflops              of training, without what is computed twice, per second

With `--case "NAME key=value ..."`, once or more, the recipe is measured once for each case, with these keys added, and
each case prints a line of its own with its name as `case`. A case that fails has an `error`, and the others go on.
"""

import argparse
import gc
import itertools
import math
import resource
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any

import common
import torch
from clock import PARTS, Clock, patched

from eagleray.base import cpu_share, devices
from eagleray.config import bundled
from eagleray.config.schedule import Progress
from eagleray.data.batch import Batch, whole_boxes
from eagleray.data.loader import Loader
from eagleray.data.loader_processes import processes
from eagleray.engine import loop
from eagleray.engine.precision import Precision, numerics
from eagleray.engine.world import local
from eagleray.runs import recipe
from eagleray.runs.build import build_method, build_optimizer, make_trainer
from eagleray.runs.checks import make_plan
from eagleray.runs.rank_run import place
from eagleray.runs.recipe import Recipe
from eagleray.runs.step_trace import trace_step
from eagleray.views import photometric
from eagleray.views.sampling import Views

USUAL = "dino_vits16_in1k_ep100"
IMAGES = 1_281_167  # in an epoch of synthetic input


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("items", nargs="*", metavar="RECIPE [key=value ...]", help=f"default: {USUAL}, else any")
    parser.add_argument("--synthetic", action="store_true", help="one batch on the device, again and again")
    parser.add_argument("--steps", type=int, default=30, help="measured")
    parser.add_argument("--warmup", type=int, default=10, help="steps before")
    parser.add_argument("--batch", type=int, help="optim.batch; data.lanes becomes their greatest common divisor")
    parser.add_argument("--case", action="append", help="a name and keys; see above")
    args = parser.parse_intermixed_args()
    if not args.case:
        with TemporaryDirectory() as out:
            name, chosen = choose(args, args.items, out)
            common.show({"recipe": name, **measure(chosen, args)}, as_json=args.json)
        return
    for case in args.case:
        title, *keys = case.split(" ")
        common.show({"case": title} | measure_case(args, [*args.items, *keys]), as_json=args.json)


def measure_case(args: argparse.Namespace, items: Sequence[str]) -> dict[str, Any]:
    """Return the figures of one case, or its error in one line."""
    with TemporaryDirectory() as out:
        try:
            name, chosen = choose(args, items, out)
            return {"recipe": name, **measure(chosen, args)}
        except Exception as e:  # of one case; a GPU that the others can use is worth theirs
            return {"error": f"{type(e).__name__}: {' '.join(str(e).split())}"[:300]}
        finally:
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()


def choose(args: argparse.Namespace, given: Sequence[str], out: str) -> tuple[str, Recipe]:
    items = list(given)
    name = items.pop(0) if items and "=" not in items[0] else usual()
    batch = [f"optim.batch={args.batch}"] if args.batch else []
    chosen = recipe.load(name, [*items, *batch, "workers=0", f"out={out}"])
    if args.batch:
        chosen = replace(chosen, data=replace(chosen.data, lanes=math.gcd(chosen.data.lanes, args.batch)))
    return name, chosen


def usual() -> str:
    return USUAL if USUAL in bundled.names() else bundled.names()[0]


def measure(r: Recipe, args: argparse.Namespace) -> dict[str, Any]:
    world = local()
    precision = Precision.of(r.precision, world.device)
    method = build_method(r)
    place(method, r, world)
    optimizer = build_optimizer(r, method)
    feed = Feed(r, world.device, synthetic=args.synthetic)
    clock = Clock(world.device)
    with patched(clock, method, optimizer), numerics(precision, deterministic=r.deterministic):
        batches = itertools.islice(feed, args.warmup + args.steps)
        steps = make_trainer(r, method, optimizer, precision).steps(batches)
        seconds, loss = timed(steps, args, feed, clock)
    peak = memory(world.device)
    gpu = devices.is_accelerator(world.device)
    trace = trace_step(r, ranks=1, dataset=IMAGES, dtype=precision.dtype, gpu=gpu)
    result = {
        "device": world.device.type,
        "input": "synthetic" if args.synthetic else "data",
        "batch": r.optim.batch,
        "steps": args.steps,
        "images_per_s": r.optim.batch * args.steps / seconds,
        "step_ms": 1000 * seconds / args.steps,
    }
    parts = {n: 1000 * clock.seconds(n) / args.steps for n in PARTS}
    result |= {f"{n}_ms": ms for n, ms in parts.items()} | {"rest_ms": result["step_ms"] - sum(parts.values())}
    result |= {"data_wait": feed.waited / seconds, "peak_memory_mib": peak, "planned_memory_mib": trace.peak / 2**20}
    return result | {"tflops": trace.flops / (seconds / args.steps) / 1e12, "loss": loss.item()}


def timed(
    steps: Iterator[loop.Step], args: argparse.Namespace, feed: "Feed", clock: Clock
) -> tuple[float, torch.Tensor]:
    """Seconds of the measured steps, and the last loss."""
    deque(itertools.islice(steps, args.warmup), maxlen=0)
    common.wait(feed.device)
    clock.spans.clear()
    feed.waited, begin = 0.0, time.perf_counter()
    [last] = deque(steps, maxlen=1)
    common.wait(feed.device)
    return time.perf_counter() - begin, last.values["loss"]


class Feed:
    """Batches without end, each with the progress of a step in the middle of training; notes the time waited."""

    def __init__(self, r: Recipe, device: torch.device, *, synthetic: bool) -> None:
        self.device, self.waited, self.epochs = device, 0.0, r.optim.epochs
        if synthetic:
            self.steps_per_epoch = IMAGES // r.optim.batch
            self.batches: Iterator[Batch] = itertools.repeat(made_up(r, device))
        else:
            stream = make_plan(r, note=common.note).stream
            self.steps_per_epoch = stream.steps_per_epoch
            loader = Loader(stream, rank=0, ranks=1, workers=processes(r.data.workers, cpu_share.cpus()), device=device)
            self.batches = (batch for batch, _ in loader.batches(0))

    def __iter__(self) -> Iterator[tuple[Progress, Batch]]:
        for step in itertools.count(self.steps_per_epoch * self.epochs // 2):
            asked = time.perf_counter()
            batch = next(self.batches)
            self.waited += time.perf_counter() - asked
            yield Progress(step, self.steps_per_epoch, self.epochs), batch


def made_up(r: Recipe, device: torch.device) -> Batch:
    """Random pixels, normalised as views are."""
    b, sizes = r.optim.batch, [v.size for v in Views.of(r.views).views]
    pixels = [torch.randint(0, 256, (b, 3, s, s), dtype=torch.uint8, device=device) for s in sizes]
    views = [photometric.normalise_(p.float() / 255) for p in pixels]
    label = torch.zeros(b, dtype=torch.long, device=device)
    return Batch(views, torch.arange(b), label, (b,), whole_boxes(views))


def memory(device: torch.device) -> float:
    """MiB."""
    if devices.is_accelerator(device):
        return torch.accelerator.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


if __name__ == "__main__":
    common.run(main)
