"""What `eagleray plan` predicts beside what a step takes: memory and time on this machine's CPU.

Six networks, each as its recipe has it, in micro-batches (where it has no batch norm) and with its activations computed
again. The time is predicted from two short steps, of half the batch or less, which compute nothing again.

memory, memory_predicted      MiB of tensors at the peak of a step, as PyTorch's allocator counts them
seconds, seconds_predicted    of a step, CPU time of one thread, so that other work on the machine matters little
memory_error, seconds_error   predicted / measured - 1
rss                           MiB that the process has mapped after the step, for comparison
worst_memory, worst_seconds   the largest errors of all rows
"""

import time
from dataclasses import replace
from typing import Any, NamedTuple

import common
import memory
import torch
from torch import Tensor

from eagleray.base.allocator import keep_freed_memory
from eagleray.base.devices import CPU
from eagleray.datasets.catalogue import images_of
from eagleray.engine.precision import Precision
from eagleray.models.token_linear import on_device
from eagleray.protocols import throughput
from eagleray.runs import local_forecast, recipe
from eagleray.runs.accelerators import cpu_rates, find
from eagleray.runs.build import build_method, build_optimizer
from eagleray.runs.forecast import TrainingSet, devices_of, forecast
from eagleray.runs.recipe import Recipe
from eagleray.runs.step_trace import BUFFERS, made_up, steps, trace_images

MIB = 2**20


class Case(NamedTuple):
    """A network to plan for."""

    name: str
    images: int  # of a step
    keys: tuple[str, ...] = ()
    micro: int | None = None  # None: it has batch norm, which needs the whole batch


TINY = ("backbone={name: vit_tiny_patch16_224}", "views=[{size: 224, count: 2}]")
CASES = {
    "vit_xs": Case("mocov3_vitxs8_cifar10_ep2", 64, (), 16),
    "vit_ti": Case("simclr_vitxs8_cifar10_ep2", 8, TINY, 2),
    "vit_s": Case("dino_vits16_in1k_ep100", 4, (), 1),
    "vit_b": Case("mocov3_vitb16_in1k_ep300", 4, (), 1),
    "swin_t": Case("esvit_swint_in1k_ep300", 2, (), 1),
    "resnet_50": Case("moco_resnet50_in1k_ep200", 8, ("method.norm_group=4", "method.queue=4096")),
}  # fmt: skip


# The papers' main rows, for `--table`.
HEADLINES = (
    "mocov3_vits16_in1k_ep300",
    "mocov3_vitb16_in1k_ep300",
    "dino_vits16_in1k_ep100",
    "dino_vits16_in1k_ep800",
    "esvit_swint_in1k_ep300",
    "selfpatch_vits16_in1k_ep200",
    "drloc_swint_in100_ep300",
)
GPUS = 8, 16, 64


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES), help="networks")
    parser.add_argument("--keys", nargs="+", default=[], help="recipe keys to change, such as of a smaller network")
    parser.add_argument("--table", action="store_true", help="print the plans of HEADLINES on H100s for docs/plan.md")
    args = parser.parse_args()
    if args.table:
        table()
        return
    torch.set_num_threads(1)
    keep_freed_memory()  # as `pretrain` does
    rows: dict[str, Any] = {}
    for name in args.only:
        case = CASES[name]
        loaded = recipe.load(case.name, [*case.keys, *args.keys])
        half = max(case.images // 2, 2)
        variants: dict[str, dict[str, Any]] = {"": {}, "_checkpointing": {"checkpointing": True}}
        variants |= {"_micro_batch": {"micro_batch": case.micro}} if case.micro else {}
        for variant, keys in variants.items():
            chosen = replace(loaded, optim=replace(loaded.optim, batch=case.images, **keys))
            rates = local_forecast.calibrated(cpu_rates(), chosen, CPU, half, time.process_time)
            rows[name + variant] = compare(chosen, case.images, rates)
            common.note(f"{name + variant}: {rows[name + variant]}")
    worst = {f"worst_{what}": max(abs(r[f"{what}_error"]) for r in rows.values()) for what in ("memory", "seconds")}
    common.show({**rows, **worst}, as_json=args.json)


def table() -> None:
    """Print what the papers' headline rows take on H100s, as rows of a Markdown table."""
    for name in HEADLINES:
        data = TrainingSet(images_of(name) or 0, local_forecast.IMAGE_BYTES)
        for ranks in GPUS:
            found = forecast(recipe.load(name), devices_of("h100", find("h100"), ranks), data)
            assert found.hours, name
            cells = [f"`{name}`", ranks, found.images_per_rank, f"{found.memory_needed / 2**30:.1f}"]
            cells += [f"{found.images_per_s:,.0f}", f"{found.mfu:.0%}", found.limit]
            cells += [f"{found.hours:.1f}", f"{found.hours * ranks:,.0f}"]
            print("|", " | ".join(map(str, cells)), "|", flush=True)


def compare(chosen: Recipe, images: int, rates: Any) -> dict[str, float]:
    """Predict a step, take it, and return both."""
    found = trace_images(chosen, images, ranks=1, dataset=images, dtype=torch.float32, gpu=False)
    measured, seconds, own = measure(chosen, images)
    predicted = found.peak - found.memory[BUFFERS] + own  # the monitor, which takes no part here, has a buffer too
    row = {
        "memory": measured / MIB,
        "memory_predicted": predicted / MIB,
        "memory_error": predicted / measured - 1,
        "seconds": seconds,
        "seconds_predicted": rates.seconds(found),
        "seconds_error": rates.seconds(found) / seconds - 1,
        "rss": memory.of().rss,
    }
    return {k: common.short(v) for k, v in row.items()}


def measure(chosen: Recipe, images: int) -> tuple[int, float, int]:
    """Return the peak memory and the CPU time of a step, and the bytes of the method's buffers."""
    method = on_device(build_method(chosen), CPU)
    method.allocate(images)
    optimizer, batch = build_optimizer(chosen, method), made_up(chosen, images)
    precision = Precision(torch.float32, CPU)

    def step() -> None:
        list(steps(chosen, method, optimizer, [batch], precision))

    step()
    times: list[float] = []
    while len(times) < 2 or sum(times) < local_forecast.LEAST:
        began = time.process_time()
        step()
        times.append(time.process_time() - began)
    moments = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    peak = throughput.peak(step, method, CPU) + sum(t.nbytes for t in (*moments, *batch.views))
    return peak, min(times), sum(b.nbytes for b in method.buffers())


if __name__ == "__main__":
    common.run(main)
