"""Choose the number that says without labels whether a backbone has learnt: train small runs, and compare the order in
which each candidate ranks their backbones with that of kNN.

    python benchmarks/evidence.py --data CIFAR10 [--work DIR] [--images 2560] [--epochs 4] [--settings NAME ...]

CIFAR10 is a folder of the shards of CIFAR-10, of which the first one is trained on. On it, and on as many of the drawn
shapes of `make demo`, the settings of SETTINGS are trained, and their backbones and the untrained one are measured on
1,000 held-out images. A run takes about half a minute of one CPU core.

within       mean over the data sets of Spearman's correlation with kNN among all backbones of one data set
sides        share of the trained backbones which the candidate puts on the same side of the untrained one as kNN does,
             of those whose kNN differs from it by more than two standard errors
"""

import itertools
import json
import shutil
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import eagleray
from eagleray.datasets import shapes
from eagleray.datasets.shards import Sample, encode, write_shards
from eagleray.models.backbone import Backbone
from eagleray.protocols.image_batches import batches
from eagleray.runs import recipe as recipes
from eagleray.runs.build import build_backbone
from eagleray.runs.checks import make_plan
from eagleray.runs.monitor import alignment, effective_rank, uniformity
from eagleray.runs.sources import resolve_paths
from eagleray.runs.verdicts import Comparison
from eagleray.sweeps.label_free import spearman
from eagleray.views.photometric import normalise

SETTINGS = {
    "mocov3": ("mocov3_vitxs8_shapes_demo", {}),
    "mocov3, high rate": ("mocov3_vitxs8_shapes_demo", {"optim.lr.value": 0.03}),
    "mocov3, low rate": ("mocov3_vitxs8_shapes_demo", {"optim.lr.value": 1e-5}),
    "byol": ("byol_vitxs8_cifar10_ep2", {}),
    "simsiam": ("simsiam_vitxs8_cifar10_ep2", {}),
    "simclr": ("simclr_vitxs8_cifar10_ep2", {}),
    "barlow twins": ("barlow_twins_vitxs8_cifar10_ep2", {}),
}
SMALLER = {f"backbone.options.{k}": n for k, n in (("embed_dim", 64), ("depth", 3), ("num_heads", 2))}
SMALLER |= {"workers": 0, "optim.batch": 64, "monitor.every": 1000, "evaluate.limit": 2000, "evaluate.probe_epochs": 0}
TEST = 1000  # held-out images
MANY = 8  # crops of an image for LiDAR


def draw(folder: Path, count: int, seed: int) -> str:
    """Write shards of drawn shapes, unless they are there, and return their folder."""

    def samples() -> Iterator[Sample]:
        for i in range(count):
            image, label = shapes.image(seed, i)
            yield Sample(f"{i:06d}", "png", encode(image), label)

    if not (folder / "index.parquet").exists():
        shutil.rmtree(folder, ignore_errors=True)
        write_shards(samples(), str(folder), size=4 * 2**20)
    return str(folder)


def crops(images: Tensor, size: int, seed: int, low: float, high: float) -> Tensor:
    """Return a random square crop (b, 3, size, size) of each image (b, 3, S, S), with `low` to `high` of its area."""
    generator, side, out = np.random.default_rng(seed), images.shape[-1], []
    for image in images:
        s = max(round(side * generator.uniform(low, high) ** 0.5), 1)
        top, left = generator.integers(0, side - s + 1, 2)
        part = image[None, :, top : top + s, left : left + s].float()
        out.append(F.interpolate(part, size=(size, size), mode="bilinear", antialias=True).round().byte())
    return torch.cat(out)


@torch.inference_mode()
def embed(backbone: Backbone, images: Tensor) -> Tensor:
    return torch.cat([backbone.pooled(normalise(part, part.device)).float() for part in images.split(256)])


def found(a: Tensor, b: Tensor) -> float:
    """Return in percent how often the row of `a` is the nearest one to the same row of `b`."""
    near = F.normalize(b, dim=1) @ F.normalize(a, dim=1).T
    return 100 * float((near.argmax(1) == torch.arange(len(a))).float().mean())


def lidar(views: list[Tensor]) -> float:
    """Return LiDAR (Thilak et al. 2023, arXiv:2312.04000, section 4.2) of the features (n, D) of several crops of each
    image."""
    x = torch.stack(views).double()  # (q, n, D)
    means = x.mean(0)
    between = torch.cov(means.T)
    inside = (x - means).flatten(0, 1)
    within = inside.T @ inside / (len(inside) - len(means)) + 1e-4 * torch.eye(x.shape[-1], dtype=x.dtype)
    values, vectors = torch.linalg.eigh(within)
    root = vectors @ torch.diag(values.clamp(min=1e-12).rsqrt()) @ vectors.T
    p = torch.linalg.eigvalsh(root @ between @ root).clamp(min=0)
    p = p / p.sum()
    return float(torch.exp(-torch.xlogy(p, p).sum()))


def candidates(backbone: Backbone, images: Tensor, size: int) -> dict[str, float]:
    """Return all candidates of a backbone on the same centre crops (n, 3, S, S)."""
    whole = embed(backbone, images)
    small = [embed(backbone, crops(images, size, seed, 0.2, 1.0)) for seed in range(MANY)]
    half = [embed(backbone, crops(images, size, seed, 0.4, 0.6)) for seed in (100, 101)]
    a, b = (F.normalize(x, dim=1) for x in small[:2])
    mean = torch.cat(small[:2]).mean(0)
    unit = F.normalize(whole, dim=1)
    return {
        "crops found, area 0.2-1": found(small[0], small[1]),
        "crops found, area 0.4-0.6": found(half[0], half[1]),
        "crops found, centred": found(small[0] - mean, small[1] - mean),
        "crop of 0.4-0.6 finds the whole": found(whole, half[0]),
        "-alignment": -float(alignment(a, b)),
        "-uniformity": -float(uniformity(unit)),
        "-alignment-uniformity": -float(alignment(a, b)) - float(uniformity(unit)),
        "RankMe": float(effective_rank(unit)),
        "label_free": float(effective_rank(unit).log() - uniformity(unit)),
        "LiDAR": lidar(small),
    }


def measure(run: eagleray.Run, untrained: bool) -> dict[str, Any]:
    recipe = resolve_paths(recipes.load(f"{run.out}/recipe.yaml", []))
    plan = make_plan(recipe, note=lambda _: None)
    torch.manual_seed(0)
    backbone = (build_backbone(recipe) if untrained else run.backbone()).eval()
    assert plan.test is not None
    e = recipe.evaluate
    images = torch.cat([x for _, x in batches(plan.test, np.arange(min(TEST, len(plan.test))), e.resize, e.resize)])
    numbers = candidates(backbone, images, e.size)
    return {"knn": run.summary["knn/top1" + "_untrained" * untrained], "images": len(plan.test), **numbers}


def sign(row: Mapping[str, Any], untrained: Mapping[str, Any]) -> int:
    """Return whether kNN is above the untrained backbone's by more than chance, or below it."""
    return Comparison.of_shares("kNN", row["knn"], untrained["knn"], row["images"]).sign


def correlations(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return `within` and `sides` of each candidate, as the head of this file says, and the correlation by data set."""
    names = [k for k in rows[0] if k not in ("data", "setting", "knn", "images")]
    sets = [list(of) for _, of in itertools.groupby(rows, lambda row: row["data"])]
    out: dict[str, dict[str, float]] = {}
    for name in names:
        by_set = {of[0]["data"]: spearman([r[name] for r in of], [r["knn"] for r in of]) for of in sets}
        signs = [(sign(r, of[0]), r[name] > of[0][name]) for of in sets for r in of]
        agree = [(side > 0) == above for side, above in signs if side]
        out[name] = {"within": statistics.fmean(by_set.values()), "sides": statistics.fmean(agree or [0]), **by_set}
    return out


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--data", required=True, help="folder of shards of CIFAR-10")
    parser.add_argument("--work", type=Path, default=Path("runs/evidence"))
    parser.add_argument("--images", type=int, default=2560)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS))
    args = parser.parse_args()
    sets: dict[str, tuple[str, ...]] = {"cifar10": (f"{args.data}/train-000000.tar", f"{args.data}/test-000000.tar")}
    parts = [("train", args.images), ("test", TEST)]
    sets["shapes"] = tuple(draw(args.work / "shapes" / name, n, seed) for seed, (name, n) in enumerate(parts))
    rows = []
    for name, (train, test) in sets.items():
        for i, setting in enumerate(args.settings):
            recipe, keys = SETTINGS[setting]
            given = SMALLER | keys | {"data.train": train, "data.test": test, "optim.epochs": args.epochs}
            run = eagleray.pretrain(recipe, given, out=args.work / "runs" / f"{name}-{list(SETTINGS).index(setting)}")
            for untrained in (True, False) if not i else (False,):
                rows.append({"data": name, "setting": "untrained" if untrained else setting, **measure(run, untrained)})
                common.note(json.dumps(rows[-1]))
    common.show({"correlations": correlations(rows), "rows": rows}, as_json=args.json)


if __name__ == "__main__":
    common.run(main)
