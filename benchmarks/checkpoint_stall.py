"""What checkpoints cost a training step: the time for which the loop is blocked, and the steps beside a save.

Starts the server of the tests on loopback and trains as `step.py` does, on random pixels; every `--every` seconds a
checkpoint with weights and optimiser goes to the server and is read back. Steps beside a save and those between saves
take turns in one run, so that a machine whose speed drifts favours none. The server runs here too: leave it a core.

blocked_ms, blocked_most_ms     of the loop in one save, the first left out; blocked_first_ms: it fetches its memory
blocked_cpu_ms                  what the loop's thread worked meanwhile, which other work on the machine does not change
step_ms, step_saving_ms         medians of steps without and with a save in the background; step_cpu_ms,
                                step_saving_cpu_ms: what the loop's thread worked in them
slower, slower_cpu              step_saving_ms / step_ms - 1, and of the loop's thread alone
save_s                          until the checkpoint counts
save_cpu_s                      of it, spent by the process beside the training thread
mib                             of a checkpoint
stall, stall_cpu                blocked_ms and blocked_cpu_ms as shares of a minute
stall_all                       the same with what the steps beside a save took longer, if one save is made a minute
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import common
import step
import streaming
import torch

from eagleray.engine import checkpoint
from eagleray.engine.precision import Precision
from eagleray.engine.world import local
from eagleray.runs.build import build_method, build_optimizer, make_trainer
from eagleray.runs.recipe import Recipe

USUAL = str(Path(__file__).parent / "recipes" / "mocov3_vits16.yaml")


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("items", nargs="*", metavar="RECIPE [key=value ...]", help="default: MoCo v3 on ViT-S/16")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--saves", type=int, default=4, help="measured, after one more")
    parser.add_argument("--every", type=float, default=60, help="seconds from the end of a save to the next")
    parser.add_argument("--threads", type=int, default=1, help="of the training step, on a CPU")
    parser.add_argument("--place", help="where checkpoints go; default: the tests' server")
    args = parser.parse_intermixed_args()
    torch.set_num_threads(args.threads)
    args.items = args.items if args.items and "=" not in args.items[0] else [USUAL, *args.items]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        name, recipe = step.choose(args, args.items, str(folder / "out"))
        if not args.place:
            stack.enter_context(streaming.server(folder / "s3"))
        writer = checkpoint.Writer(args.place or f"{streaming.BUCKET}/run", keep=2, scratch=folder / "scratch")
        result = measure(recipe, writer, args)
        size = (writer.scratch / f"{checkpoint.manifests(writer.url)[0]}.pt").stat().st_size
    sizes = {"recipe": Path(name).stem, "batch": recipe.optim.batch, "threads": args.threads}
    common.show(result | {"mib": size / 2**20} | sizes, as_json=args.json)


Pair = tuple[float, float]


def timed(do: Callable[[], object]) -> Pair:
    wall, mine = time.perf_counter(), time.thread_time()
    do()
    return time.perf_counter() - wall, time.thread_time() - mine


@dataclass
class Times:
    """Seconds; pairs are of the wall and of the loop's thread."""

    blocked: list[Pair] = field(default_factory=list)  # by save
    plain: list[Pair] = field(default_factory=list)  # by step
    saving: list[Pair] = field(default_factory=list)
    saves: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)  # of the CPU, by save


def measure(recipe: Recipe, writer: checkpoint.Writer, args: argparse.Namespace) -> dict[str, Any]:
    world = local()
    method = build_method(recipe).to(world.device)
    optimizer = build_optimizer(recipe, method)
    feed, precision = step.Feed(recipe, world.device, synthetic=True), Precision.of(recipe.precision, world.device)
    steps = make_trainer(recipe, method, optimizer, precision).steps(feed)

    def take() -> None:
        next(steps)
        common.wait(world.device)

    def one() -> Pair:
        return timed(take)

    for _ in range(3):
        one()
    times = Times()
    for number in itertools.count(1):
        save(number, writer, {"method": method.state_dict(), "optimizer": optimizer.state_dict()}, one, times)
        if number > args.saves:
            return summary(times)
        until = time.perf_counter() + args.every
        while time.perf_counter() < until:
            times.plain.append(one())
    raise AssertionError


def save(number: int, writer: checkpoint.Writer, state: dict[str, Any], one: Callable[[], Pair], times: Times) -> None:
    """A save, and steps until it counts."""
    began, whole, mine = time.perf_counter(), time.process_time(), time.thread_time()
    times.blocked.append(timed(lambda: writer.save(number, {"step": number, **state})))
    while writer.busy:
        times.saving.append(one())
    times.saves.append(time.perf_counter() - began)
    times.beside.append((time.process_time() - whole) - (time.thread_time() - mine))
    writer.settle()
    common.note(f"save {number}: blocked {1000 * times.blocked[-1][0]:.0f} ms, counts after {times.saves[-1]:.1f} s")


def summary(times: Times) -> dict[str, Any]:
    def median(pairs: list[Pair]) -> Pair:
        wall, mine = map(statistics.median, zip(*pairs, strict=True))
        return wall, mine

    first, *rest = times.blocked
    blocked, plain, saving = median(rest), median(times.plain), median(times.saving)
    longer = statistics.median(times.saves) * (1 - plain[0] / saving[0])
    return {
        "blocked_ms": 1000 * blocked[0],
        "blocked_most_ms": 1000 * max(rest)[0],
        "blocked_first_ms": 1000 * first[0],
        "blocked_cpu_ms": 1000 * blocked[1],
        "step_ms": 1000 * plain[0],
        "step_saving_ms": 1000 * saving[0],
        "step_cpu_ms": 1000 * plain[1],
        "step_saving_cpu_ms": 1000 * saving[1],
        "slower": saving[0] / plain[0] - 1,
        "slower_cpu": saving[1] / plain[1] - 1,
        "save_s": statistics.median(times.saves),
        "save_cpu_s": statistics.median(times.beside),
        "stall": blocked[0] / 60,
        "stall_cpu": blocked[1] / 60,
        "stall_all": (blocked[0] + max(longer, 0)) / 60,
        "steps": len(times.plain),
        "steps_saving": len(times.saving),
        "saves": len(rest),
    }


if __name__ == "__main__":
    common.run(main)
