"""Planted faults in a data set of real images: which columns find them, and what choosing by them does to a run.

    python benchmarks/curation.py --data DATA [--steps 780] [--seeds 3] [--out runs/curation] [--json]

From CIFAR-10 in DATA, one class twenty times as frequent as each of the others, with 5 % exact copies, 5 % near copies
(half compressed again, half cropped by two pixels on every side and enlarged), and 1 % each of dark, blurred and tiny
images. SimCLR on all of it, with large crops that keep their colours, gives features that tell images apart rather than
classes; `eagleray data measure`, `embed` and `data cluster` make the columns. The other runs are MoCo v3's. What is
done already is read from `--out`. Images of which CIFAR-10 itself has a copy, by hashes within 12 bits of 63, are left
out, as they would count as errors of `copy_precision`; those that this does not find do.

NAME_precision, NAME_recall         of what the cut of a column finds, by fault; each cut is in CUTS
ARM_knn, ARM_knn_deviation          kNN top-1 in percent of runs of `--steps` steps on all images, without near copies,
                                    and balanced; the bank is CIFAR-10's training set, whatever a run has read
"""

import io
import statistics
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import cv2
import numpy as np
import pandas
from numpy.typing import NDArray
from PIL import Image

import eagleray
from eagleray.datasets.measure import phash
from eagleray.datasets.shards import Sample, write_shards
from eagleray.runs import layout

RECIPE = "mocov3_vitxs8_cifar10_ep2"
TWINS = "simclr_vitxs8_cifar10_ep2"  # whose features find copies
LARGE = {
    "size": 32,
    "count": 2,
    "scale": [0.6, 1.0],
    "interpolation": "bilinear",
    "flip": 0.0,
    "jitter": 0.0,
    "gray": 0.0,
}
FREQUENT, OTHERS = 4_500, 225  # images of one class, and of each of the nine others
FROG = 6  # the frequent one: many of CIFAR-10's airplanes are a spot in the same sky, and its cars have copies
COPIES, FAULTS = 0.05, 0.01  # shares of the images
CUTS = {
    "dark": "luma_p99 < 60",
    "blurred": "sharpness < 60 and luma_p99 >= 60",
    "tiny": "min_side < 24",
}
ARMS = {
    "all": {},
    "without_copies": {"where": "duplicate_of is null"},
    "balanced": {"where": "duplicate_of is null", "weight": "balance"},
}
OWN_BITS = 12  # of 63, by which the hashes of CIFAR-10's own copies differ at most
BATCH = 128  # of the recipe
Pixels = NDArray[np.uint8]


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with cifar10/")
    parser.add_argument("--steps", type=int, default=780)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--similar", type=float, default=0.97, help="cosine similarity of near copies")
    parser.add_argument("--bits", type=int, default=18, help="by which the hashes of near copies differ at most")
    parser.add_argument("--out", type=Path, default=Path("runs/curation"))
    args = parser.parse_args()
    shards = args.out / "shards"
    if not shards.exists():
        write_shards(planted(args.data / "cifar10"), str(shards))
    first = run(args, "copies", 0, TWINS, {"views": [LARGE], "data.train": str(shards)})
    eagleray.measure(shards, workers=0)
    features = eagleray.embed(first, shards)
    eagleray.find_clusters(features, shards, clusters=[20], similar=args.similar, bits=args.bits)
    table = columns(shards)
    result: dict[str, Any] = {"images": len(table), "steps": args.steps, "similar": args.similar}
    result |= {"bits": args.bits} | found(table)
    for name in result:
        common.note(f"{name}: {result[name]}")
    for arm in ARMS:
        scores = [knn(trained(args, arm, seed), args.data / "cifar10") for seed in range(args.seeds)]
        result |= {f"{arm}_knn": round(statistics.mean(scores), 2)}
        result |= {f"{arm}_knn_deviation": round(statistics.pstdev(scores), 2)} if args.seeds > 1 else {}
        common.note(f"{arm}: {scores}")
    common.show(result, as_json=args.json)


def planted(cifar: Path) -> Iterator[Sample]:
    """Yield the samples; the first words of a key say what is wrong with it, and of which one it is a copy."""
    draw = np.random.default_rng(0)
    for number, (data, label) in enumerate(base(cifar), 1):
        yield Sample(f"good_{number:06d}", "jpg", data, label)
        kind = draw.choice(
            ["", "exact", "compressed", "cropped", "dark", "blurred", "tiny"],
            p=[1 - 2 * COPIES - 3 * FAULTS, COPIES, COPIES / 2, COPIES / 2, FAULTS, FAULTS, FAULTS],
        )
        if kind:
            yield Sample(f"{kind}_{number:06d}", "jpg", changed(data, str(kind)), label)


def base(cifar: Path) -> Iterator[tuple[bytes, int]]:
    """Yield images without copies among them, and their labels, as many of each class as there should be."""
    left, hashes = dict.fromkeys(range(10), OTHERS) | {FROG: FREQUENT}, np.zeros(0, np.uint64)
    for data, label in images(cifar):
        if left.get(label):
            grey: Any = cv2.cvtColor(np.array(Image.open(io.BytesIO(data)).convert("RGB")), cv2.COLOR_RGB2GRAY)
            own = np.uint64(int(phash(grey), 16))
            if (np.bitwise_count(hashes ^ own) <= OWN_BITS).any():
                continue
            left[label] -= 1
            hashes = np.append(hashes, own)
            yield data, label


def images(cifar: Path) -> Iterator[tuple[bytes, int]]:
    """Yield the images and labels of some shards."""
    for shard in sorted(cifar.glob("train-*.tar")):
        with tarfile.open(shard) as tar:
            parts: dict[str, bytes] = {}  # of a sample, in either order
            for member in tar:
                data = tar.extractfile(member)
                assert data
                parts["label" if member.name.endswith(".cls") else "image"] = data.read()
                if len(parts) == 2:
                    yield parts["image"], int(parts["label"])
                    parts = {}


def changed(data: bytes, kind: str) -> bytes:
    """Return an image with a fault. An image with one fault is one image more, beside the good one."""
    if kind == "exact":
        return data
    pixels = np.array(Image.open(io.BytesIO(data)).convert("RGB"))
    if kind == "cropped":
        pixels = cv2.resize(pixels[2:-2, 2:-2], pixels.shape[1::-1], interpolation=cv2.INTER_CUBIC)
    elif kind == "dark":
        pixels = (pixels * 0.15).astype(np.uint8)
    elif kind == "blurred":
        pixels = cv2.GaussianBlur(pixels, (0, 0), 3)
    elif kind == "tiny":
        pixels = cv2.resize(pixels, (16, 16), interpolation=cv2.INTER_AREA)
    Image.fromarray(pixels).save(buffer := io.BytesIO(), "JPEG", quality=50 if kind == "compressed" else 90)
    return buffer.getvalue()


def columns(shards: Path) -> pandas.DataFrame:
    """Return all columns of all samples, by key."""
    tables = [pandas.read_parquet(folder) for folder in sorted((shards / "columns").iterdir())]
    return pandas.concat([table.set_index("key") for table in tables], axis=1)


def found(table: pandas.DataFrame) -> dict[str, float]:
    """Return the precision and recall of every cut.

    Of an image and its copy either may be the one that stays, so pairs count: one that is named by a column, and
    one that was planted. A dark, blurred or tiny image and the one it was made from may be called copies or not."""
    kind, number = table.index.str.split("_").str[0], table.index.str.split("_").str[1]
    original = table["duplicate_of"].str.rpartition("/")[2].str.split("_")
    named = original.notna().to_numpy()
    same = (original.str[1] == pandas.Series(number, table.index)).to_numpy() & named
    alike = ["good", "exact", "compressed", "cropped"]
    right = same & np.isin(kind, alike) & original.str[0].isin(alike).to_numpy()
    named = named & (right | ~same)
    groups = np.isin(kind, alike[1:]).sum()
    out = {"copy_precision": right.sum() / max(named.sum(), 1), "copy_recall": right.sum() / groups}
    for name in alike[1:]:
        of = set(number[kind == name])
        out[f"{name}_recall"] = len({n for n, r in zip(number, right, strict=True) if r and n in of}) / len(of)
    for name in ("dark", "blurred", "tiny"):
        low, fault = table.eval(CUTS[name]).to_numpy(), kind == name
        out[f"{name}_precision"] = (low & fault).sum() / max(low.sum(), 1)
        out[f"{name}_recall"] = (low & fault).sum() / fault.sum()
    return {name: round(float(value), 4) for name, value in out.items()}


def trained(args: Any, arm: str, seed: int) -> str:
    """Return the folder of a run on the samples of an arm."""
    return run(args, arm, seed, RECIPE, {"data.train": {"url": str(args.out / "shards"), **ARMS[arm]}})


def run(args: Any, name: str, seed: int, recipe: str, own: dict[str, Any]) -> str:
    """Return the folder of a run, after taking its steps if it has not."""
    out = args.out / f"{name}-{seed}"
    if not (out / layout.SUMMARY).exists():
        epochs = -(-args.steps // (OTHERS * 9 // BATCH))  # enough of them, whatever is left out
        keys = {"max_steps": args.steps, "optim.epochs": epochs, "seed": seed, "workers": 0}
        keys |= {"evaluate.probe_epochs": 0, "monitor.every": 100}
        if not eagleray.pretrain(recipe, keys | own, out=out).finished:
            raise SystemExit(130)  # interrupted
    return str(out)


def knn(run: str, cifar: Path) -> float:
    """Return kNN top-1 in percent, over all of CIFAR-10."""
    scores = eagleray.evaluate(run, train=f"{cifar}/train-*.tar", test=f"{cifar}/test-*.tar", protocols=["knn"])
    return float(scores["knn/top1"])


if __name__ == "__main__":
    common.run(main)
