"""Count the operations that PyTorch dispatches in a training step of each method, and the waits for the device.

A step is that of a run on one rank: forward, backward, clipping, optimiser, momentum copy, the guard against gradients
that are not finite, and what the monitor collects. It is the fourth step, and it writes no line of the log. Networks
have the depth and the views of the methods' recipes and little width, as depth alone makes the number of operations.

It is taken on the tests' simulated accelerator, which needs pytest.

operations   what reaches PyTorch's dispatcher after autograd: kernels and views; a foreach operation counts once
kernels      those that compute or move something
planned      how many of these `eagleray plan` finds in its trace
waits        how often the host waits for the device
"""

import collections
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import common
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from eagleray.engine.precision import Precision
from eagleray.runs import recipe
from eagleray.runs.build import build_method, build_optimizer
from eagleray.runs.monitor import Monitor
from eagleray.runs.recipe import Recipe
from eagleray.runs.step_trace import made_up, steps, trace_step, works

sys.path.insert(0, str(common.ROOT / "tests"))  # for the simulated accelerator
STEPS = 4  # the last one is counted
IMAGES = 200  # of the training set that there is not
BATCH = 4
RECIPES = {
    "barlow_twins": "barlow_twins_resnet50_in1k_ep1000",
    "byol": "byol_resnet50_in1k_ep1000",
    "byol_regions": "byol_regions_swint_in1k_ep50",
    "densecl": "densecl_resnet50_in1k_ep200",
    "detco": "detco_resnet50_in1k_ep200",
    "distill": "distill_vits16_in1k_ep100",
    "dino": "dino_vits16_in1k_ep100",
    "dinov2": "dinov2_vits16_in1k_ep200",
    "dinov3": "dinov3_vits16_in1k_ep200",
    "drloc": "drloc_swint_in100_ep100",
    "esvit": "esvit_swint_in1k_ep300",
    "ibot": "ibot_vits16_in1k_ep800",
    "instdisc": "instdisc_resnet50_in1k_ep200",
    "instloc": "instloc_resnet50_in1k_ep200",
    "lejepa": "lejepa_vits16_in1k_ep100",
    "mae": "mae_vits16_in1k_ep1600",
    "mpp": "mpp_vitb16_in1k_ep320",
    "moby": "moby_swint_in1k_ep300",
    "moco": "moco_resnet50_in1k_ep200",
    "mocov3": "mocov3_vits16_in1k_ep300",
    "pirl": "pirl_resnet50_in1k_ep200",
    "pixpro": "pixpro_resnet50_in1k_ep100",
    "selfpatch": "selfpatch_vits16_in1k_ep200",
    "selfpatch_moby": "selfpatch_moby_swint_coco_ep200",
    "simclr": "simclr_resnet50_in1k_ep800",
    "simsiam": "simsiam_resnet50_in1k_ep100",
    "supervised": "supervised_swint_in100_ep100",
    "swav": "swav_resnet50_in1k_ep800",
    "vicreg": "vicreg_resnet50_in1k_ep1000",
}
# What makes a network narrow and leaves it as deep, by the first letters of its name and by the key of a method.
NARROW: dict[str, dict[str, Any]] = {
    "vit": {"embed_dim": 24, "num_heads": 3},
    "swin": {"embed_dim": 24, "num_heads": [1, 2, 4, 8]},
    "esvit_swin": {"embed_dim": 24, "num_heads": [1, 2, 4, 8]},
    "resnet": {"channels": [8, 16, 32, 64], "stem_width": 8},
}
FEW = {"dim": 16, "hidden": 32, "region_hidden": 32, "patch_hidden": 32, "bottleneck": 16, "prototypes": 64}
FEW |= {"patch_prototypes": 32, "queue": 64, "negatives": 16, "norm_group": 2, "heads": 3}
FEW |= {"embedding": 16, "slices": 32, "decoder_dim": 32, "decoder_heads": 4}
# A step of these draws Mixup, which the plan counts, or CutMix, which has two operations fewer.
MIXING = ("drloc", "supervised")


class Counter(TorchDispatchMode):
    """Counts the operations by name, all and those that work."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: collections.Counter[str] = collections.Counter()
        self.kernels: collections.Counter[str] = collections.Counter()

    def clear(self) -> None:
        self.operations.clear()
        self.kernels.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations[func._schema.name] += 1
        self.kernels[func._schema.name] += works(func)
        return func(*args, **(kwargs or {}))


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--methods", nargs="*", metavar="NAME", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--top", type=int, default=0, help="print the most frequent operations of each method too")
    args = parser.parse_args()
    result = {}
    for name in args.methods:
        r = narrow(name)
        counted, waits = count(r)
        planned = trace_step(r, ranks=1, dataset=IMAGES, dtype=torch.bfloat16, gpu=True).operations
        row: dict[str, float] = {"operations": counted.operations.total(), "kernels": counted.kernels.total()}
        row |= {"planned": planned, "waits": len(waits)}
        result[name] = row
        common.note(f"{name:<16}" + "".join(f"{n:>8}" for n in row.values()) + "  " + "; ".join(sorted(set(waits))))
        for operation, n in counted.operations.most_common(args.top):
            common.note(f"    {operation:<50}{n:>6}")
    if args.json:
        print(json.dumps({"methods": result}), flush=True)


def narrow(method: str) -> Recipe:
    """Return the method's recipe with a narrow network and a small batch."""
    r = recipe.load(RECIPES[method], ["workers=0", f"optim.batch={BATCH}", f"data.lanes={BATCH}"])
    options = next(v for k, v in reversed(NARROW.items()) if r.backbone.name.startswith(k))
    network = replace(r.backbone, options={**r.backbone.options, **options})
    few: dict[str, Any] = {k: v for k, v in FEW.items() if r.method.args.get(k)}
    few |= {"cutmix": 0.0} if method in MIXING else {}
    return replace(r, backbone=network, method=replace(r.method, args=r.method.args | few))


def count(r: Recipe) -> tuple[Counter, list[str]]:
    """Return the operations of the last step on the tests' simulated accelerator, and what made the host wait."""
    from helpers.simulated_device import DEVICE, simulated

    with simulated() as waits, Counter() as counted:

        def last() -> None:
            counted.clear()
            waits.clear()

        take_steps(r, DEVICE, last)
        return counted, list(waits)


def take_steps(r: Recipe, device: torch.device, last: Callable[[], None]) -> None:
    """Take the steps of a run, and call `last` before the last one."""
    torch.manual_seed(0)
    method = build_method(r)
    method.allocate(IMAGES)
    method.to(device)
    optimizer = build_optimizer(r, method)
    monitor = Monitor(method, optimizer, r.monitor, images=IMAGES, labelled=True)
    batches = [made_up(r, BATCH, device=device)] * STEPS
    for i, step in enumerate(steps(r, method, optimizer, batches, Precision.of(r.precision, device))):
        monitor.watch(step)
        if i == STEPS - 2:
            last()


if __name__ == "__main__":
    common.run(main)
