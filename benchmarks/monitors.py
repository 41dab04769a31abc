"""What it costs that a run watches itself: two copies of a method train on the same batches, one of them watched, and
take turns step by step, so that whatever else the machine does meets both.

    python benchmarks/monitors.py [RECIPE] [key=value ...] [--rounds 5] [--json]

overhead                       seconds of the watched copy / seconds of the plain one - 1, over so many rounds of a look
                               and the steps up to it
overhead_low, overhead_high    95 % of bootstrap samples of the pairs of turns lie between them
step_ms                        mean of a plain step
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import common
import torch
from step import made_up
from torch import Tensor

from eagleray.base import devices
from eagleray.config.schedule import Progress
from eagleray.data.batch import Batch
from eagleray.engine.loop import Step, Trainer
from eagleray.engine.world import local
from eagleray.runs import recipe
from eagleray.runs.build import build_method, build_optimizer, scaled_lr
from eagleray.runs.health import Health, Spikes
from eagleray.runs.monitor import Monitor
from eagleray.runs.recipe import Recipe

IMAGES = 50_000  # of which the bank keeps a tenth
DRAWS = 2000  # bootstrap samples


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("recipe", nargs="?", default="mocov3_vitxs8_cifar10_ep2")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    r = recipe.load(args.recipe, args.overrides)
    seconds, kinds = measure(r, args.rounds)
    low, high = interval(seconds, kinds)
    plain, watched = seconds.sum(0).tolist()
    result = {
        "recipe": args.recipe,
        "batch": r.optim.batch,
        "looks": args.rounds,
        "steps": args.rounds * r.monitor.every,
        "step_ms": 1000 * plain / (args.rounds * r.monitor.every),
        "overhead": watched / plain - 1,
        "overhead_low": low - 1,
        "overhead_high": high - 1,
    }
    common.show(result, as_json=args.json)


def measure(r: Recipe, rounds: int) -> tuple[Tensor, list[tuple[int, int]]]:
    """Seconds (turns, 2) of the plain and of the watched copy, and how many looks and log lines each turn had."""
    # A GPU that is waited for after every step would show what a run hides behind the work that is queued.
    length = r.monitor.every if devices.is_accelerator(local().device) else 1
    copies = steps_of(r, watch=False), steps_of(r, watch=True)
    for taken in copies:
        taken(r.monitor.every)  # the first steps and the first look allocate
    seconds, kinds, order = [], [], random.Random(0)
    for begin in range(r.monitor.every, (1 + rounds) * r.monitor.every, length):
        first = order.randrange(2)  # neither is always the one that finds the caches warm
        pair = {i: copies[i](length) for i in (first, 1 - first)}
        seconds.append([pair[0], pair[1]])
        ends = begin + length
        kinds.append((ends // r.monitor.every - begin // r.monitor.every, ends // r.log_steps - begin // r.log_steps))
    return torch.tensor(seconds, dtype=torch.float64), kinds


def interval(seconds: Tensor, kinds: list[tuple[int, int]]) -> tuple[float, float]:
    """95 % of the ratio of sums (turns, 2), each kind of turn drawn as often as there are turns of it."""
    torch.manual_seed(0)
    sums = torch.zeros(DRAWS, 2, dtype=torch.float64)
    for kind, count in Counter(kinds).items():
        of = seconds[torch.tensor([k == kind for k in kinds])]
        sums += of[torch.randint(count, (DRAWS, count))].sum(1)
    ends = (sums[:, 1] / sums[:, 0]).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
    return ends[0].item(), ends[1].item()


def steps_of(r: Recipe, *, watch: bool) -> Callable[[int], float]:
    """Takes so many steps more, and gives their seconds: of this process where there is no GPU to wait for, so that
    other work on the machine matters little. The weights at the start and the batches are always the same."""
    device = local().device
    torch.manual_seed(r.seed)
    method = build_method(r)
    method.allocate(IMAGES)
    method.to(device)
    optimizer = build_optimizer(r, method)
    monitor = Monitor(method, optimizer, r.monitor, images=IMAGES, labelled=True) if watch else None
    health = Health(Spikes(monitor.layers if monitor else []), scaled_lr(r).value)
    batch = replace(made_up(r, device), label=torch.randint(1000, (r.optim.batch,), device=device))

    def feed() -> Iterator[tuple[Progress, Batch]]:
        step = 0
        while True:
            yield Progress(step, 1000, 1000), batch
            step += 1

    trainer = Trainer(method, optimizer, lr=scaled_lr(r), weight_decay=r.optim.weight_decay, clip=r.optim.clip)
    steps = trainer.steps(feed())
    clock = time.perf_counter if devices.is_accelerator(device) else time.process_time

    def take(n: int) -> float:
        common.wait(device)
        began = clock()
        for _ in range(n):
            taken = next(steps)
            if monitor:
                look(taken, monitor, health, r)
        common.wait(device)
        return clock() - began

    return take


def look(taken: Step, monitor: Monitor, health: Health, r: Recipe) -> None:
    """What a run does with a step beside training."""
    monitor.watch(taken)
    if monitor.step % r.log_steps == 0:
        seen, norms = monitor.flush()
        health.gradients(monitor.step - len(norms), norms)
        health.look({"step": monitor.step, "lr": 1.0, "skipped_steps": 0} | seen)


if __name__ == "__main__":
    common.run(main)
