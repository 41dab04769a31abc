"""What it costs that a run watches itself: the same steps with and without, in turns of as many as lie between two
looks.

    python benchmarks/monitors.py [RECIPE] [key=value ...] [--rounds 5] [--json]"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import common
import torch
from step import made_up

from eagleray import recipe, run
from eagleray.cluster.world import local
from eagleray.data.batch import Batch
from eagleray.health import Health
from eagleray.monitor import Monitor
from eagleray.recipe import Recipe
from eagleray.train import Step, fit

IMAGES = 50_000  # of which the bank keeps a tenth


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("recipe", nargs="?", default="mocov3_vitxs8_cifar10_ep2")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    r = recipe.load(args.recipe, args.overrides)
    plain, watched = turns(r, watch=False), turns(r, watch=True)
    plain(), watched()  # the first turn allocates
    pairs = [(plain(), watched()) for _ in range(args.rounds)]
    ratios = [b / a for a, b in pairs]
    result = {
        "recipe": args.recipe,
        "batch": r.optim.batch,
        "steps_per_turn": r.monitor.every,
        "step_ms": 1000 * statistics.median(a for a, _ in pairs) / r.monitor.every,
        "overhead": statistics.median(ratios) - 1,
        "overhead_least": min(ratios) - 1,
        "overhead_most": max(ratios) - 1,
    }
    common.show(result, as_json=args.json)


def turns(r: Recipe, *, watch: bool) -> Callable[[], float]:
    """Takes as many steps as lie between two looks, and gives their seconds: of this process where there is no GPU to
    wait for, so that other work on the machine matters little."""
    device = local().device
    method = run.build(r)
    method.begin(IMAGES)
    method.to(device)
    optimizer = run.make_optimizer(r, method)
    monitor = Monitor(method, optimizer, every=r.monitor.every, bank=IMAGES // 10, labelled=True) if watch else None
    health = Health(monitor.layers if monitor else [], run.scaled(r).value)
    batch = replace(made_up(r, device), label=torch.randint(1000, (r.optim.batch,), device=device))

    def feed() -> Iterator[tuple[run.Progress, Batch]]:
        step = 0
        while True:
            yield run.Progress(step, 1000, 1000), batch
            step += 1

    steps = fit(method, feed(), optimizer, lr=run.scaled(r), weight_decay=r.optim.weight_decay, clip=r.optim.clip)
    clock = time.perf_counter if device.type == "cuda" else time.process_time

    def turn() -> float:
        common.wait(device)
        began = clock()
        for _ in range(r.monitor.every):
            taken = next(steps)
            if monitor:
                look(taken, monitor, health, r)
        common.wait(device)
        return clock() - began

    return turn


def look(taken: Step, monitor: Monitor, health: Health, r: Recipe) -> None:
    """What a run does with a step beside training."""
    monitor.watch(taken)
    if monitor.step % r.log_steps == 0:
        seen, norms = monitor.flush()
        health.gradients(monitor.step - len(norms), norms)
        health.look({"step": monitor.step, "lr": 1.0, "skipped_steps": 0} | seen)


if __name__ == "__main__":
    common.run(main)
