"""Memory, result and speed of evaluations whose features are divided among ranks.

Synthetic features of `--dim` numbers and `--classes` classes are classified by kNN and by an epoch of the linear probe
on 1, 2 and 4 ranks, processes that exchange by gloo. Photographs are read as an evaluation reads them, and as training
reads them with one view, in turns, from bytes to normalised pixels.

overhead_mb     the worst rank's peak of resident memory above its share of the features, by number of ranks
law_mb          the same by the law below
same_top1       whether all numbers of ranks gave the same kNN top-1, to the last digit
same_linear     the probe's top-1 by number of ranks, which add gradients in another order
rate_of_loader  images per second of CPU time of an evaluation's reading, as a share of the training loader's; both
                with `--workers` loader processes, whose time counts

The law, for N training images, Q test images and C classes on W ranks, with k neighbours and R learning rates:
    share     (N + Q) / W rows of D numbers, 4 bytes each, or 2 in bf16
    above it  rows of the share: 4 bytes of norm and 8 of label
              200 MB of PyTorch's own and of freed memory that the allocator keeps, and the larger one of
              tiles of kNN: 1024 x 4096 x 28 bytes, and 1024 x k x 16 x W for the neighbours of all ranks
              the probe: R x D x C x 16 bytes of weights, momenta and gradients, 3 x R x 1024 x C x 4 of logits,
              and 24 bytes for each of the N images of its random order
`extrapolated` gives it for ImageNet-1k (384 numbers) and ImageNet-22k (768 numbers) on 1, 8 and 64 ranks, in GB.
"""

import multiprocessing
import statistics
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import common
import numpy as np
import synthetic
import torch

from eagleray.config.view import View
from eagleray.data.index import Index, open_index
from eagleray.data.loader import Loader
from eagleray.data.reader import Stream
from eagleray.protocols.catalogue import Linear
from eagleray.protocols.features import LabelledFeatures, own_samples
from eagleray.protocols.image_batches import BATCH, Reading, batches
from eagleray.protocols.knn import CHUNK, TILE, knn
from eagleray.protocols.linear import linear
from eagleray.views import photometric
from eagleray.views.sampling import Views

NEIGHBOURS = 20
SPREAD = 4.0  # of the features around the centre of their class, so that not all are classified right
FIXED = 200e6  # bytes
SETS = {"imagenet-1k": (1_281_167, 50_000, 384, 1000), "imagenet-22k": (12_800_000, 50_000, 768, 21_841)}
RANKS = (1, 8, 64)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--images", type=int, default=64_000, help="training features")
    parser.add_argument("--queries", type=int, default=4_000, help="test features")
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--photographs", type=int, default=1024, help="per round; 0: no reading")
    parser.add_argument("--workers", type=int, default=1, help="loader processes that read them")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--data", help="folder or URL of shards to read; default: synthetic 500 x 375 photographs")
    args = parser.parse_args()
    size = (args.images, args.queries, args.dim, args.classes)
    worlds = {n: evaluate(n, size) for n in args.ranks}
    tops = [rank["top1"] for world in worlds.values() for rank in world]
    result: dict[str, Any] = {
        "overhead_mb": {n: round(max(rank["overhead"] for rank in world) / 1e6, 1) for n, world in worlds.items()},
        "law_mb": {n: round(above(*size, n) / 1e6, 1) for n in worlds},
        "share_mb": {n: round(share(*size[:3], n) / 1e6, 1) for n in worlds},
        "same_top1": len(set(tops)) == 1,
        "top1": tops[0],
        "same_linear": {n: world[0]["linear"] for n, world in worlds.items()},
        "seconds": {n: round(max(rank["seconds"] for rank in world), 1) for n, world in worlds.items()},
        "extrapolated": {
            f"{name} on {n}": f"{share(*s[:3], n) / 1e9:.2f} + {above(*s, n) / 1e9:.2f}"
            for name, s in SETS.items()
            for n in RANKS
        },
    }
    if args.photographs:
        with synthetic.shards(args.data, images=args.photographs) as (url, spare):
            index = open_index(url, spare, note=common.note)
            result["rate_of_loader"], result["images_per_s"] = reading(
                index, args.photographs, args.rounds, args.workers
            )
    common.show(result, as_json=args.json)


def share(images: int, queries: int, dim: int, ranks: int) -> float:
    """The bytes of a rank's share of the features in float32."""
    return (images + queries) / ranks * dim * 4


def above(images: int, queries: int, dim: int, classes: int, ranks: int) -> float:
    """The bytes that a rank needs above its share, by the law."""
    rows = (images + queries) / ranks * 12
    neighbours = CHUNK * TILE * 28 + CHUNK * NEIGHBOURS * 16 * ranks
    probe = len(Linear().rates) * classes * (dim * 16 + 3 * 1024 * 4) + 24 * images
    return rows + FIXED + max(neighbours, probe)


def evaluate(ranks: int, size: tuple[int, int, int, int]) -> list[dict[str, Any]]:
    """What each rank measured. The processes are copies of this one, which has imported everything."""
    context = multiprocessing.get_context("fork")
    queue: Any = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=rank_main, args=(r, ranks, size, folder, queue)) for r in range(ranks)]
        for process in processes:
            process.start()
        results = [queue.get() for _ in processes]
        for process in processes:
            process.join()
    return results


def rank_main(rank: int, ranks: int, size: tuple[int, int, int, int], folder: str, queue: Any) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    torch.distributed.init_process_group("gloo", store, rank=rank, world_size=ranks)
    images, queries, dim, classes = size
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = resident("VmRSS")
    train, test = (features(n, dim, classes, seed) for seed, n in enumerate((images, queries)))
    own = sum(x.x.numel() * x.x.element_size() for x in (train, test))
    began = time.perf_counter()
    top1 = knn(train, test, k=NEIGHBOURS)["knn/top1"]
    probe = linear(train, test, epochs=1)["linear/top1"]
    seconds = time.perf_counter() - began
    overhead = resident("VmHWM") - before - own
    queue.put({"top1": top1, "linear": round(probe, 3), "overhead": overhead, "seconds": seconds})
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def features(count: int, dim: int, classes: int, seed: int) -> LabelledFeatures:
    """This rank's rows of a table that is the same on any number of ranks."""
    centres = torch.randn(classes, dim, generator=torch.Generator().manual_seed(0))
    mine = own_samples(np.arange(count))
    x, y = torch.empty(len(mine), dim), torch.empty(len(mine), dtype=torch.long)
    for first in range(0, len(mine), BATCH):
        generator = torch.Generator().manual_seed(1 + 2 * int(mine[first]) + seed)
        rows = slice(first, min(first + BATCH, len(mine)))
        y[rows] = torch.randint(classes, (rows.stop - first,), generator=generator)
        x[rows] = centres[y[rows]] + SPREAD * torch.randn(rows.stop - first, dim, generator=generator)
    return LabelledFeatures(x, y)


def resident(kind: str) -> int:
    """The bytes of this process in memory, now (VmRSS) or at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind))


def reading(index: Index, images: int, rounds: int, workers: int) -> tuple[float, dict[str, float]]:
    """The median ratio of the two rates, and the median rates, of so many loader processes."""
    batch = min(BATCH, images, len(index)) // workers * workers
    samples, device = np.arange(min(images, len(index)) // batch * batch), torch.device("cpu")
    view = View(size=224, jitter=0.0, gray=0.0)  # a crop and a flip alone
    stream = Stream(index, Views.of((view,)), seed=0, lanes=workers, batch=batch)
    loader = Loader(stream, rank=0, ranks=1, workers=workers, device=device)

    def train() -> None:
        deque(loader.batches(0, len(samples) // batch), maxlen=0)

    def test() -> None:
        for _, crops in batches(index, samples, 224, 256, batch, reading=Reading(workers)):
            photometric.normalise(crops, device)

    rates: dict[str, list[float]] = {"loader": [], "evaluation": []}
    for turn in range(rounds + 1):  # the first one warms up
        work = [("loader", train), ("evaluation", test)]
        for name, function in work if turn % 2 else work[::-1]:
            # Not in CPU time: loader processes are children of a server, which no clock of this process counts.
            began = time.perf_counter()
            function()
            rates[name].append(len(samples) / (time.perf_counter() - began))
    pairs = list(zip(rates["evaluation"], rates["loader"], strict=True))[1:]
    medians = {name: round(statistics.median(values[1:]), 1) for name, values in rates.items()}
    return statistics.median(a / b for a, b in pairs), medians


if __name__ == "__main__":
    common.run(main)
