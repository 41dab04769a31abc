"""Curation at size: what clusters and near copies cost and find among many features, and among real images.

    python benchmarks/curation_size.py [--samples 200000] [--data DATA] [--json]

The features are synthetic, of 384 numbers, around topics and subjects; the shards are sparse files. 5 % of the samples
are copies with a cosine similarity of 0.955 to 1 to an original, and 5 % are look-alikes with 0.7 to 0.945, so that an
exact search with `--similar 0.95` would find all copies and nothing else. Each size is clustered in a process of its
own: an eighth, a quarter and a half of the samples, and all of them.

STAGE_s                   seconds of one core for the stages of the largest size: what all threads of the process take,
                          however busy the machine is
peak_mib                  memory of the process at its highest, and `empty_mib` before its work
precision, recall         of pairs of an original and a copy; recall_one_cluster is the share of these that lie within
                          one cluster
fitted_N_inertia          mean of 1 - cosine with the nearest centre, of centres fitted to N samples per cluster ...
fitted_N_agreement        ... and the adjusted Rand index of their clusters and those of exact k-means
law                       core seconds a sample, and operations a core second of k-means and the assignment, fitted to
                          all sizes by least squares; the core seconds and MiB that follow for a million and a hundred
                          million samples

With `--data`, `eagleray curate` reads 20,000 images of CIFAR-10 with docs/backbone. To 2 % each, a copy is planted that
is compressed (JPEG of quality 50), cropped by a pixel on every side and enlarged, mirrored, blurred (0.7 pixels) or of
another colour (saturation 0.8, brightness 1.1). Images of which CIFAR-10 has a copy, by hashes within 12 bits, are left
out before, as they would count as errors. KIND_recall is of the planted copies of a kind.
"""

import io
import itertools
import json
import multiprocessing
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import common
import cv2
import numpy as np
import pandas
import pyarrow as pa
import torch
from curation import columns, images
from numpy.typing import NDArray
from PIL import Image, ImageEnhance

import eagleray
from eagleray.base import devices
from eagleray.curation import cluster as clustering
from eagleray.curation import kmeans
from eagleray.curation.near_copies import MIRRORED
from eagleray.data import index as indexing
from eagleray.data.columns import MEASURED
from eagleray.data.digests import data_digest, shard_digests
from eagleray.data.index import open_index
from eagleray.data.index_file import SCHEMA
from eagleray.data.sample_table import About, SampleTable
from eagleray.datasets.measure import phash
from eagleray.datasets.shards import Sample, write_shards
from eagleray.evaluation.embeddings import COLUMN, WHAT, column_of
from eagleray.storage.blob import Blob

DIM, SIMILAR = 384, 0.95
COPIES = 0.05  # share of the samples, and of look-alikes
BYTES = 1000  # an image has so many, and an original one more than its copy
IN_SHARD = 10_000
FITTED = (64, 256)  # samples per cluster that centres are fitted to
OWN_BITS, PLANTED, REAL = 12, 0.02, 20_000
Pixels = NDArray[np.uint8]


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--samples", type=int, default=200_000)
    parser.add_argument("--data", type=Path, help="folder with cifar10/")
    parser.add_argument("--out", type=Path, default=Path("runs/curation_size"), help="folder for the real images")
    args = parser.parse_args()
    result: dict[str, Any] = {"samples": args.samples}
    sizes = [args.samples // part for part in (8, 4, 2, 1)]
    found = []
    for samples in sizes:
        with TemporaryDirectory() as folder:
            alone(write, folder, samples)
            found.append(alone(clustered, folder))
            common.note(json.dumps({"samples": samples} | found[-1]))
            if samples == args.samples:
                result |= found[-1] | alone(fitted, folder)
    result |= {"law": law(sizes, found)}
    if args.data:
        result |= {"real": real(args.data / "cifar10", args.out)}
    common.show(result, as_json=args.json)


def alone(function: Callable[..., Any], *given: object) -> Any:
    """The result of a new process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, given)


def write(folder: str, samples: int) -> None:
    """Write sparse shards with an index, and the features of their samples."""
    first = np.arange(0, samples, IN_SHARD)
    indexing.save(folder, [shard(Path(folder), n, int(s), samples) for n, s in enumerate(first)])
    index = open_index(folder, note=common.note)
    settings = {"digest": "synthetic", "kind": "pooled", "dim": DIM, "size": 1, "resize": 1, "precision": "float32"}
    about = About(WHAT, settings, data_digest(index, np.arange(len(index))), len(index))
    table = SampleTable.create(f"{folder}/features", about)
    draw = np.random.default_rng(0)
    topics, subjects = (unit(draw.normal(size=(samples // n + 1, DIM))) for n in (5000, 200))
    for part in table.parts:
        x = vectors(draw, table.samples(part), topics, subjects)
        table.write(part, index, {COLUMN: column_of(x, np.ones(len(x), bool))})


def shard(folder: Path, number: int, first: int, samples: int) -> tuple[Blob, pa.Table]:
    """A sparse tar and what an index says of it. Keys are numbers of samples; the originals' files are larger."""
    rows = np.arange(first, min(first + IN_SHARD, samples))
    ends, n = np.cumsum(np.full(len(rows), 512 + 1024)), len(rows)
    path = folder / f"train-{number:06d}.tar"
    with path.open("wb") as tar:
        tar.truncate(int(ends[-1]) + 1024)
    size = np.where(partner(rows) >= 0, BYTES, BYTES + 1)
    made = [[f"{r:09d}" for r in rows.tolist()], ends - 1024, size, np.zeros(n), np.zeros(n), pa.nulls(n)]
    table = pa.table([pa.array(c, f.type) for c, f in zip(made, SCHEMA, strict=True)], SCHEMA)
    return Blob(str(path), path.stat().st_size), table


def partner(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """The original of each copy, which is the sample before it, -1 of others."""
    return np.where(rows % int(1 / COPIES) == 1, rows - 1, -1)


def vectors(draw: Any, rows: NDArray[np.int64], topics: Any, subjects: Any) -> NDArray[np.float32]:
    """Features (n, D): a topic, a subject and noise. The 2nd of 20 is a copy of the 1st, and the 4th is like the 3rd.
    Parts begin at a multiple of 4, so none of these pairs is torn."""
    topic = (len(topics) * draw.random(len(rows)) ** 2).astype(int)  # some are frequent, many are rare
    subject = draw.integers(0, len(subjects), len(rows))
    x = unit(0.5 * topics[topic] + 0.5 * subjects[subject] + 0.7 * unit(draw.normal(size=(len(rows), DIM))))
    for place, low, high in ((1, SIMILAR + 0.005, 1.0), (3, 0.7, SIMILAR - 0.005)):
        at = np.flatnonzero((rows % int(1 / COPIES) == place) & (np.arange(len(rows)) > 0))
        cosine, noise = draw.uniform(low, high, (len(at), 1)), draw.normal(size=(len(at), DIM))
        across = unit(noise - (noise * x[at - 1]).sum(1, keepdims=True) * x[at - 1])
        x[at] = cosine * x[at - 1] + np.sqrt(1 - cosine**2) * across
    return x.astype(np.float32)


def unit(x: Any) -> Any:
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def opened(folder: str) -> tuple[Any, SampleTable, SampleTable]:
    """An index, its features and the table of its clusters."""
    index, features = open_index(folder, note=common.note), f"{folder}/features"
    given = json.loads(Path(features, "_table.json").read_text())
    embedding = SampleTable(features, About(**given))
    settings = {"clusters": clustering.default_levels(len(index)), "similar": SIMILAR, "keep": 0.5, "seed": 0}
    about = About(MEASURED, settings, embedding.about.data, len(index), shards=shard_digests(index))
    return index, embedding, SampleTable.create(f"{folder}/columns/clusters", about)


def clustered(folder: str) -> dict[str, Any]:
    """Core seconds of each stage, MiB, and what is found."""
    index, features, table = opened(folder)
    seconds: dict[str, float] = {}
    empty, clock = peak(), [time.process_time()]

    def tick(phase: str, _done: int, _total: int) -> None:
        clock.append(time.process_time())
        seconds[phase] = seconds.get(phase, 0.0) + clock[-1] - clock[-2]

    clustering.work(clustering.Task(features, table, folder, gpus=False), index, devices.CPU, tick, common.note)
    tick("writing", 1, 1)
    out = {f"{name.replace(' ', '_')}_s": common.short(value) for name, value in seconds.items()}
    out |= {"seconds": common.short(sum(seconds.values())), "peak_mib": round(peak()), "empty_mib": round(empty)}
    found = pandas.read_parquet(table.folder).set_index("key").sort_index()
    named = found["duplicate_of"].str.rpartition("/")[2].fillna("-1").astype(int).to_numpy()
    planted, of = partner(np.arange(len(found))), found["cluster"].to_numpy()
    right, copies = (named == planted) & (planted >= 0), planted >= 0
    out |= {"precision": right.sum() / (named >= 0).sum(), "recall": right.sum() / copies.sum()}
    return out | {"recall_one_cluster": float((of[copies] == of[planted[copies]]).mean())}


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def fitted(folder: str) -> dict[str, float]:
    """What k-means on a part of the samples costs, against all of them."""
    index, features, _ = opened(folder)
    parts = [torch.from_numpy(clustering.vectors(features, part)[0]) for part in features.parts]
    numbers = [torch.from_numpy(kmeans.numbers_of(part.numpy(), 0)) for part in parts]
    clusters = clustering.default_levels(len(index))[0]
    drawn = kmeans.shares(len(index), clusters)[1]
    first = kmeans.spread(torch.cat([x[n < drawn] for x, n in zip(parts, numbers, strict=True)]), clusters, 0)
    labels, out = {}, {}
    for each in (*FITTED, 0):
        share = each * clusters / len(index) if each else 2.0
        some = [x[n < share] for x, n in zip(parts, numbers, strict=True)]
        centres = kmeans.kmeans(lambda _, some=some: some, first)  # type: ignore[misc]
        near = [kmeans.nearest(x, centres) for x in parts]
        labels[each] = torch.cat([label for label, _ in near]).numpy()
        out[f"fitted_{each or 'all'}_inertia"] = float(1 - torch.cat([value for _, value in near]).mean())
    for each in FITTED:
        out[f"fitted_{each}_agreement"] = agreement(labels[each], labels[0])
    return out


def agreement(a: NDArray[np.int64], b: NDArray[np.int64]) -> float:
    """The adjusted Rand index of two partitions (N,)."""
    pairs = [
        float((n * (n - 1.0) / 2).sum()) for n in (np.unique(c, return_counts=True)[1] for c in (a * 2**31 + b, a, b))
    ]
    chance = pairs[1] * pairs[2] / (len(a) * (len(a) - 1.0) / 2)
    return (pairs[0] - chance) / ((pairs[1] + pairs[2]) / 2 - chance)


def products(samples: int) -> float:
    """Floating-point operations of k-means and of the assignment."""
    clusters = clustering.default_levels(samples)[0]
    share = min(kmeans.shares(samples, clusters)[0], 1)
    return 2.0 * DIM * clusters * samples * (kmeans.ROUNDS * share + 1)


def law(sizes: list[int], found: list[dict[str, Any]]) -> dict[str, Any]:
    """Seconds and MiB of a process by the number of samples. All but the products grows with the samples alone."""
    dense = [row["k-means_s"] + row["assigning_s"] for row in found]
    rate = sum(products(n) ** 2 for n in sizes) / sum(products(n) * s for n, s in zip(sizes, dense, strict=True))
    rest = np.array([row["seconds"] for row in found]) - dense
    each = float((rest * sizes).sum() / np.square(sizes, dtype=float).sum())
    slope, empty = np.polyfit(sizes, [row["peak_mib"] for row in found], 1)
    out: dict[str, Any] = {"seconds_a_sample": common.short(each), "operations_a_second": common.short(rate)}
    for samples in (10**6, 10**8):
        out[f"seconds_{samples}"] = round(each * samples + products(samples) / rate)
        out[f"mib_{samples}"] = round(empty + slope * samples)
    return out


def real(cifar: Path, out: Path) -> dict[str, Any]:
    """What `eagleray curate` finds among images with planted copies."""
    shards = out / "shards"
    if not shards.exists():
        write_shards(planted(cifar), str(shards))
    begin = time.perf_counter()
    result: dict[str, Any] = dict(eagleray.curate(shards, common.ROOT / "docs" / "backbone", out))
    result["seconds"] = time.perf_counter() - begin
    table = columns(shards)
    kind, number = table.index.str.split("_").str[0], table.index.str.split("_").str[1].to_numpy()
    named = table["duplicate_of"].notna().to_numpy()
    right = named & (table["duplicate_of"].str.rpartition("/")[2].str.split("_").str[1] == number).to_numpy()
    planted_ones = int((kind != "good").sum())
    result |= {"planted": planted_ones, "precision": right.sum() / named.sum(), "recall": right.sum() / planted_ones}
    for name in CHANGES:  # either an image or its copy may be the one that stays
        of = set(number[kind == name])
        result[f"{name}_recall"] = len(of & set(number[right])) / len(of)
    return {
        name: common.short(float(v)) if isinstance(v, np.floating) else common.short(v) for name, v in result.items()
    }


def planted(cifar: Path) -> Iterator[Sample]:
    """Yield the samples; the first word of a key says how it was changed, the second of which image it is."""
    draw, number, hashes = np.random.default_rng(0), 0, np.zeros(0, np.uint64)
    for data, label in images(cifar):
        pixels = np.array(Image.open(io.BytesIO(data)).convert("RGB"))
        own = np.uint64(int(phash(cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY)), 16))  # type: ignore[arg-type]
        apart = np.minimum(np.bitwise_count(hashes ^ own), np.bitwise_count(hashes ^ own ^ MIRRORED))
        if (apart <= OWN_BITS).any():
            continue
        hashes, number = np.append(hashes, own), number + 1
        yield Sample(f"good_{number:06d}", "jpg", data, label)
        kind = draw.choice(["", *CHANGES], p=[1 - PLANTED * len(CHANGES), *itertools.repeat(PLANTED, len(CHANGES))])
        if kind:
            Image.fromarray(CHANGES[kind](pixels)).save(
                buffer := io.BytesIO(), "JPEG", quality=50 if kind == "compressed" else 90
            )
            yield Sample(f"{kind}_{number:06d}", "jpg", buffer.getvalue(), label)
        if number == REAL:
            return


def recoloured(pixels: Pixels) -> Pixels:
    brighter = ImageEnhance.Brightness(Image.fromarray(pixels)).enhance(1.1)
    return np.array(ImageEnhance.Color(brighter).enhance(0.8))


CHANGES: dict[str, Callable[[Pixels], Pixels]] = {
    "compressed": lambda pixels: pixels,
    "cropped": lambda pixels: cv2.resize(pixels[1:-1, 1:-1], pixels.shape[1::-1], interpolation=cv2.INTER_CUBIC),  # type: ignore[dict-item,return-value]
    "mirrored": lambda pixels: np.ascontiguousarray(pixels[:, ::-1]),
    "blurred": lambda pixels: cv2.GaussianBlur(pixels, (0, 0), 0.7),  # type: ignore[dict-item,return-value]
    "coloured": recoloured,
}


if __name__ == "__main__":
    common.run(main)
