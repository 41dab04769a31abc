"""What DRLoc adds to a step of supervised training: time and memory of the one over the other. Both train the same
backbone on the same images, a step of the one after a step of the other, so that a busy machine slows both.

A step is all of it: mixing, forward, backward, clipping and AdamW; in half precision on a GPU, in float32 on a CPU.

seconds_supervised, seconds_drloc   median step
seconds_ratio                       median of the ratios of neighbouring steps
cpu_ratio                           the same in CPU time of all threads, which other work on the machine disturbs less
memory_supervised, memory_drloc     MiB: on a GPU the peak of a step; on a CPU weights, gradients and moments with
                                    what the forward keeps for the backward
memory_ratio
"""

import statistics
import time
from collections.abc import Iterator
from typing import Any

import common
import torch
from torch import Tensor

from eagleray.base import devices
from eagleray.config.schedule import Progress
from eagleray.data.batch import Batch
from eagleray.engine import optim
from eagleray.engine.loop import Step, Trainer
from eagleray.methods.drloc import DRLoc
from eagleray.methods.method import Classifier
from eagleray.methods.supervised import Supervised
from eagleray.models.backbone import Backbone

MIB = 2**20
BACKBONES: dict[str, tuple[str, dict[str, Any]]] = {
    "swin_t": ("swin_tiny_patch4_window7_224", {}),
    "cvt_13": ("cvt_13", {}),
    "t2t_vit_14": ("t2t_vit_14", {}),
    "toy": ("vit_tiny_patch16_224", {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 1, "num_heads": 3}),
}


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--backbone", default="swin_t", choices=BACKBONES)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=20, help="of a step of each, after two to warm up")
    args = parser.parse_args()
    device = common.device()
    images = torch.randn(args.batch, 3, args.size, args.size, device=device)
    labels = torch.arange(args.batch, device=device) % args.classes
    batch = Batch([images], torch.arange(args.batch), labels, (args.batch,))
    name, options = BACKBONES[args.backbone]
    methods: dict[str, Classifier] = {}
    for which, kind in (("supervised", Supervised), ("drloc", DRLoc)):
        torch.manual_seed(0)
        methods[which] = kind(Backbone(name, drop_path=0.2, options=options), classes=args.classes).to(device)
    found = measure(methods, batch, args.rounds, device)
    setting = {name: getattr(args, name) for name in ("backbone", "batch", "size", "rounds")}
    common.show(setting | {"device": device.type} | found, as_json=args.json)


def measure(methods: dict[str, Classifier], batch: Batch, rounds: int, device: torch.device) -> dict[str, float]:
    steps = {which: endless(method, batch) for which, method in methods.items()}
    memory = {which: peak(methods[which], step, batch, device) for which, step in steps.items()}
    wall: dict[str, list[float]] = {which: [] for which in methods}
    cpu: dict[str, list[float]] = {which: [] for which in methods}
    for number in range(1 + rounds):
        for which in methods if number % 2 else reversed(methods):
            common.wait(device)
            begin = time.perf_counter(), time.process_time()
            next(steps[which])
            common.wait(device)
            if number:
                wall[which].append(time.perf_counter() - begin[0])
                cpu[which].append(time.process_time() - begin[1])
    out: dict[str, float] = {f"seconds_{which}": statistics.median(times) for which, times in wall.items()}
    for name, times in {"seconds": wall, "cpu": cpu}.items():
        pairs = zip(times["drloc"], times["supervised"], strict=True)
        out[f"{name}_ratio"] = statistics.median(a / b for a, b in pairs)
    out |= {f"memory_{which}": mib for which, mib in memory.items()}
    return out | {"memory_ratio": memory["drloc"] / memory["supervised"]}


def endless(method: Classifier, batch: Batch) -> Iterator[Step]:
    optimizer = optim.make("adamw", method, decay="matrices")
    steps = ((Progress(step, 100, 10**6), batch) for step in range(10**8))
    return Trainer(method, optimizer, lr=lambda _: 1e-4, weight_decay=lambda _: 0.05, clip=5.0).steps(steps)


def peak(method: Classifier, steps: Iterator[Step], batch: Batch, device: torch.device) -> float:
    """MiB of the second step; the first makes the moments. What the other method holds does not count."""
    weights = sum(p.numel() * p.element_size() for p in method.parameters())
    if devices.is_accelerator(device):
        before = torch.accelerator.memory_allocated(device) - weights
        next(steps)
        torch.accelerator.reset_peak_memory_stats(device)
        next(steps)
        return (torch.accelerator.max_memory_allocated(device) - before) / MIB
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    next(steps)
    own = {p.untyped_storage().data_ptr() for p in method.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        next(steps)
    return (4 * weights + sum(size for at, size in kept.items() if at not in own)) / MIB


if __name__ == "__main__":
    common.run(main)
