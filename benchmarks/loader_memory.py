"""Memory of a loader process over five epochs, and whether it stays within the bound that the documentation states.

The bound is two blocks of 16 MiB for each lane that the process owns and, on top of them, a constant: what such a
process holds whose blocks are next to nothing, and ALLOWANCE for decoding photographs. There is one loader process,
which owns all lanes. Writes a figure beside the results of the other benchmarks.

peak_rss_mib    the most of all five epochs; `peak_pss_mib` counts what it shares with the training process by half
bound_mib       what the peak must stay below
growth_mib      median of the last epoch less that of the second one
"""

import argparse
import contextlib
import multiprocessing
import statistics
import threading
import time
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import common
import memory
import synthetic
import torch

from eagleray.config.view import View
from eagleray.data.index import open_index
from eagleray.data.index_file import BLOCK
from eagleray.data.loader import Loader
from eagleray.data.reader import Stream
from eagleray.views.sampling import Views

EPOCHS = 5
ALLOWANCE = 64  # MiB
EVERY = 0.05  # seconds between two looks
VIEW = View(size=64, count=2)
FIGURE = Path(__file__).parent / "results" / "loader_memory.png"


class Look(NamedTuple):
    seconds: float
    epoch: int
    rss: float  # MiB
    pss: float


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--data", help="folder or URL of shards; default: synthetic 500 x 375 photographs")
    parser.add_argument("--images", type=int, default=3000, help="synthetic ones")
    parser.add_argument("--lanes", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--figure", type=Path, default=FIGURE)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with synthetic.shards(None, images=4 * args.batch, width=64, height=48) as (url, spare):
        constant = ALLOWANCE + max(look.rss for look in watch(opened(url, spare, args)))
    with synthetic.shards(args.data, images=args.images) as (url, spare):
        stream = opened(url, spare, args)
        looks = watch(stream)
    bound = constant + 2 * args.lanes * BLOCK / 2**20
    draw(looks, bound, args.figure)
    medians = [statistics.median(look.rss for look in looks if look.epoch == e) for e in range(EPOCHS)]
    peaks = {"peak_rss_mib": max(look.rss for look in looks), "peak_pss_mib": max(look.pss for look in looks)}
    rows = {f"epoch_{e}_rss_mib": rss for e, rss in enumerate(medians, 1)}
    sizes = {
        "images": len(stream.index),
        "blocks": len(stream.index.block_sizes),
        "lanes": args.lanes,
        "batch": args.batch,
    }
    result = peaks | {"bound_mib": bound, "growth_mib": medians[-1] - medians[1]} | rows | sizes
    common.show(result | {"figure": str(args.figure)}, as_json=args.json)


def opened(url: str, spare: Path, args: argparse.Namespace) -> Stream:
    index = open_index(url, spare, note=common.note)
    return Stream(index, Views.of([VIEW]), seed=0, lanes=args.lanes, batch=args.batch)


def watch(stream: Stream) -> list[Look]:
    """Looks at the loader process while the epochs pass."""
    loader = Loader(stream, rank=0, ranks=1, workers=1, device=torch.device("cpu"))
    looks: list[Look] = []
    step, begin, ended = 0, time.perf_counter(), threading.Event()

    def look() -> None:
        while not ended.wait(EVERY):
            for process in multiprocessing.active_children():
                epoch = min(step // stream.steps_per_epoch, EPOCHS - 1)
                with contextlib.suppress(OSError):  # it has just ended
                    looks.append(Look(time.perf_counter() - begin, epoch, *memory.of(process.pid or 0)))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for _ in islice(loader.batches(0), EPOCHS * stream.steps_per_epoch):
            step += 1
    finally:
        ended.set()
        thread.join()
    return looks


def draw(looks: list[Look], bound: float, path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
    seconds = [look.seconds for look in looks]
    axes.plot(seconds, [look.rss for look in looks], label="resident (RSS)")
    axes.plot(seconds, [look.pss for look in looks], label="its share (PSS)")
    axes.axhline(bound, color="black", linestyle="--", label="bound")
    for epoch in range(1, EPOCHS):
        axes.axvline(next(look.seconds for look in looks if look.epoch == epoch), color="lightgray", zorder=0)
    axes.set(xlabel="seconds; gray lines between epochs", ylabel="MiB", ylim=(0, None))
    axes.set_title("Memory of a loader process over five epochs")
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    common.run(main)
