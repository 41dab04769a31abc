"""What EsViT's region task adds to a step: peak memory and time of L_V + L_R over L_V, as in table 9 of its paper
(Li et al. 2022, arXiv:2106.09785), with our losses and, for comparison, with every score materialised.

A step is a forward of the teacher on the two large crops, of the student on all, the losses and the backward; the
optimiser is left out. Each number is from a process of its own: in half precision on a GPU, in float32 on a CPU. Prints
a row per backbone and batch, as far as memory goes; with --json a list of them as the last line.

memory_v, memory_vr     MiB at most, of L_V and of L_V + L_R: tensors on a GPU; on a CPU of the process, less what it
                        had before the model was made
seconds_v, seconds_vr   median step
cpu_v, cpu_vr           the same in CPU time of all threads, which other work on the machine disturbs less
loss_v, loss_vr         of the last step, from the same weights and views whichever way it is formed
memory_ratio, seconds_ratio, cpu_ratio      of L_V + L_R to L_V
region_mib              of the region task: the difference of the two memories
region_mib_per_image    what the region task adds for each image more than in the row above of this backbone; where both
                        batches fill a chunk of scores, which is at 256 rows on a CPU
official_*              the same with every score materialised (--official)
"""

import argparse
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import common
import memory
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagleray.base import devices
from eagleray.base.errors import UserError
from eagleray.engine.precision import autocast
from eagleray.losses.prototypes import Match, cross_entropy, match, mean_scores
from eagleray.models.backbone import Backbone
from eagleray.models.ema import ema_copy
from eagleray.models.heads import PrototypeHead

SWINS = {
    f"swin_{size[0]}_w{window}": f"esvit_swin_{size}_w{window}"
    for size in ("tiny", "small", "base")
    for window in (7, 14)
}
BACKBONES: dict[str, tuple[str, dict[str, Any]]] = {
    "vit_s16": ("vit_small_patch16_224", {}),
    **{name: (model, {}) for name, model in SWINS.items()},
    "toy": ("vit_tiny_patch16_224", {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 1, "num_heads": 3}),
}
TAU_T, TAU_S = 0.07, 0.1
TIGHT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
MIB = 2**20


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--backbones", nargs="+", default=[b for b in BACKBONES if b != "toy"], choices=BACKBONES)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 12])
    parser.add_argument("--sizes", nargs=2, type=int, default=[224, 96], help="of 2 large and of the small crops")
    parser.add_argument("--small", type=int, default=8, help="small crops")
    parser.add_argument("--prototypes", type=int, default=65536)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=3, help="measured, after one to warm up")
    parser.add_argument("--official", action="store_true", help="with every score materialised too; needs memory")
    parser.add_argument("--alone", nargs=4, metavar=("BACKBONE", "BATCH", "TASK", "WAY"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        backbone, batch, task, way = args.alone
        print(json.dumps(measure(args, backbone, int(batch), regions=task == "vr", official=way == "official")))
        return
    rows = [row for backbone in args.backbones for row in table(args, backbone)]
    if args.json:
        short = [{name: common.short(value) for name, value in row.items()} for row in rows]
        print(json.dumps([row | {"machine": common.machine()} for row in short]), flush=True)


def table(args: argparse.Namespace, backbone: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for batch in args.batches:
        row: dict[str, Any] = {"backbone": backbone, "batch": batch, "device": common.device().type}
        for prefix, way in {"": "ours", "official_": "official"}.items():
            if way == "official" and not args.official:
                continue
            try:
                v, vr = (alone(args, backbone, batch, task, way) for task in ("v", "vr"))
            except MemoryError:
                common.note(f"{backbone}, batch {batch}, {way}: not enough memory")
                continue
            row |= {f"{prefix}{name}_v": value for name, value in v.items()}
            row |= {f"{prefix}{name}_vr": value for name, value in vr.items()}
            row |= {f"{prefix}{name}_ratio": vr[name] / v[name] for name in ("memory", "seconds", "cpu")}
            row[f"{prefix}region_mib"] = vr["memory"] - v["memory"]
            if rows and f"{prefix}region_mib" in rows[-1]:
                more = row[f"{prefix}region_mib"] - rows[-1][f"{prefix}region_mib"]
                row[f"{prefix}region_mib_per_image"] = more / (batch - rows[-1]["batch"])
        rows.append(row)
        line = "  ".join(f"{name} {common.short(value)}" for name, value in row.items())
        print(line, file=sys.stderr if args.json else sys.stdout, flush=True)
    return rows


def alone(args: argparse.Namespace, *what: Any) -> dict[str, float]:
    """`measure` in a process of its own; on a CPU memory in another, where what is freed goes back at once, which takes
    time."""
    out = child(what, {})
    return (
        out
        if devices.is_accelerator(common.device())
        else out | {"memory": child([*what, "--steps=0"], TIGHT)["memory"]}
    )


def child(what: Sequence[Any], environment: dict[str, str]) -> dict[str, float]:
    same = [part for part in sys.argv[1:] if part != "--json"]
    command = [sys.executable, __file__, *same, "--alone", *map(str, what)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    if done.returncode == -signal.SIGKILL or "out of memory" in done.stderr or "can't allocate" in done.stderr:
        raise MemoryError
    if done.returncode:
        raise UserError(f"{' '.join(map(str, what))}: {done.stderr.splitlines()[-1]}")
    out: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return out


def measure(args: argparse.Namespace, backbone: str, batch: int, *, regions: bool, official: bool) -> dict[str, float]:
    torch.manual_seed(0)
    device = common.device()
    before = memory.of().rss
    nets = Nets(args, backbone, regions).to(device)
    sizes = [args.sizes[0]] * 2 + [args.sizes[1]] * args.small
    views = [torch.randn(batch, 3, size, size, device=device) for size in sizes]
    wall, cpu = [], []
    for _ in range(1 + args.steps):
        nets.zero_grad()
        common.wait(device)
        begin = time.perf_counter(), time.process_time()
        with autocast(device):
            loss = nets(views, materialised if official else chunked)
        loss.backward()
        common.wait(device)
        wall.append(time.perf_counter() - begin[0])
        cpu.append(time.process_time() - begin[1])
        last = loss.item()
        del loss
    if devices.is_accelerator(device):
        peak = torch.accelerator.max_memory_allocated(device) / MIB
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before
    seconds = {name: statistics.median(times[1:] or times) for name, times in {"seconds": wall, "cpu": cpu}.items()}
    return {"memory": peak, **seconds, "loss": last}


class Net(nn.Module):
    """A backbone with a head for views and one for regions."""

    def __init__(self, backbone: Backbone, heads: list[PrototypeHead]) -> None:
        super().__init__()
        self.backbone, self.heads = backbone, nn.ModuleList(heads)

    def forward(self, views: Sequence[Tensor]) -> list[list[Tensor]]:
        """Views to V x (B, 1, D) pooled vectors and V x (B, N_v, D) tokens; those of one size go through together."""
        pooled, tokens = [], []
        for same in ([x for x in views if x.shape == y.shape] for y in unique(views)):
            out = self.backbone(torch.cat(same))
            pooled += out.pooled.unsqueeze(1).chunk(len(same))
            tokens += out.patches.chunk(len(same))
        return [pooled, tokens][: len(self.heads)]


def unique(views: Sequence[Tensor]) -> list[Tensor]:
    """The first view of each size."""
    return list({x.shape: x for x in reversed(views)}.values())[::-1]


class Side(NamedTuple):
    """What a loss sees of a student or a teacher."""

    features: list[Tensor]  # V x (B, N_v, D)
    z: Tensor  # (n, d) unit bottleneck vectors
    last: nn.Linear


class Nets(nn.Module):
    def __init__(self, args: argparse.Namespace, name: str, regions: bool) -> None:
        super().__init__()
        model, options = BACKBONES[name]
        backbone = Backbone(model, options=options)
        make = lambda: PrototypeHead(backbone.dim, args.prototypes, hidden=args.hidden, free_scale=True)  # noqa: E731
        self.student = Net(backbone, [make() for _ in range(1 + regions)])
        self.teacher = ema_copy(self.student)
        self.centers = [torch.zeros(args.prototypes, device=common.device()) for _ in range(1 + regions)]

    def forward(self, views: list[Tensor], loss: Any) -> Tensor:
        s_all = self.student(views)
        with torch.no_grad():
            t_all = self.teacher(views[:2])
        total = torch.zeros((), device=views[0].device)
        for i, (s, t) in enumerate(zip(s_all, t_all, strict=True)):
            with torch.no_grad():
                teacher = side(t, self.teacher.heads[i])
            part, mean = loss(teacher, side(s, self.student.heads[i]), self.centers[i])
            self.centers[i].lerp_(mean, 0.1)
            total = total + part / len(s_all)
        return total


def side(features: list[Tensor], head: Any) -> Side:  # a PrototypeHead, out of a list of modules of any type
    rows = torch.cat([x.flatten(0, 1) for x in features])
    return Side(features, head(rows), head.last)


def chunked(t: Side, s: Side, center: Tensor) -> tuple[Tensor, Tensor]:
    """Ours: the loss, and the mean of the teacher's scores."""
    matched: Match = match(s.features, t.features)
    w_t, w_s = t.last.weight.detach(), s.last.weight
    loss = cross_entropy(t.z, s.z, w_t, w_s, center, matched, tau_t=TAU_T, tau_s=TAU_S)
    return loss, mean_scores(t.z, w_t, len(t.z))


def materialised(t: Side, s: Side, center: Tensor) -> tuple[Tensor, Tensor]:
    """Every score is there, and for each pair of views the teacher's rows are gathered and the student's log-softmax
    is formed again, as the official code does."""
    with torch.no_grad():
        scores = t.last(t.z)
        p = F.softmax((scores - center) / TAU_T, dim=-1)
        mean = scores.mean(0)
    p_views = split(p, t.features)
    log_views = split(s.last(s.z) / TAU_S, s.features)
    total, pairs = torch.zeros((), device=center.device), 0
    for q, (p_q, y) in enumerate(zip(p_views, t.features, strict=True)):
        for v, (scores_v, x) in enumerate(zip(log_views, s.features, strict=True)):
            if v != q:
                with torch.no_grad():
                    found = (F.normalize(x, dim=-1) @ F.normalize(y, dim=-1).mT).argmax(-1)
                    target = p_q.gather(1, found.unsqueeze(-1).expand(-1, -1, p_q.shape[-1]))
                total = total - (target * F.log_softmax(scores_v, dim=-1)).sum(-1).mean()
                pairs += 1
    return total / pairs, mean


def split(rows: Tensor, like: list[Tensor]) -> list[Tensor]:
    """(n, K) to V x (B, N_v, K)."""
    parts = rows.split([x.shape[0] * x.shape[1] for x in like])
    return [part.view(*x.shape[:2], -1) for part, x in zip(parts, like, strict=True)]


if __name__ == "__main__":
    common.run(main)
