"""An index over the images of ImageNet-22k: how fast it opens, what a reader holds of it, how fast a run resumes in it.

The shards are sparse files of the right sizes, so every image is zeros; keys, sizes, offsets and checksums are as real
ones would be. Each number is of a process of its own, which has imported everything before the clock starts. The index
stays in the machine's file cache.

open_s          from a folder's name to an index
open_rss_mib    memory that this adds
resume_s        from an index to the first image at the middle of an epoch, for a reader of all lanes
reader_rss_mib  memory that the index and its first images add to a reader of one lane; two blocks of 16 MiB are of it
select_s        from a folder's name to a selection, with an expression for `where` and one for `weight`
select_rss_mib  memory that this adds in the end, and select_peak_mib at its highest
chosen_rss_mib  as reader_rss_mib, of a reader that gets the selection, with the draws of two epochs
"""

import itertools
import multiprocessing
import resource
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import common
import memory
import numpy as np
import pyarrow as pa

from eagleray.config.source import Source
from eagleray.config.view import View
from eagleray.data import index as indexing
from eagleray.data.columns import select
from eagleray.data.index import open_index
from eagleray.data.index_file import SCHEMA
from eagleray.data.reader import Stream
from eagleray.data.selection import Selection
from eagleray.storage.blob import Blob
from eagleray.views.sampling import Views

T = TypeVar("T")
CLASSES = 21_841
MEAN, SPREAD = 110_000, 0.6  # bytes of an image and the deviation of their logarithm


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--images", type=int, default=14_200_000)
    parser.add_argument("--shards", type=int, default=1400)
    parser.add_argument("--lanes", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1024)
    args = parser.parse_args()
    with TemporaryDirectory() as folder:
        alone(write, folder, args.images, args.shards)
        made = {"index_mib": (Path(folder) / indexing.NAME).stat().st_size / 2**20}
        open_s, open_rss = alone(opened, folder)
        resume_s, _ = alone(resumed, folder, args.lanes, args.batch, args.lanes)
        _, reader_rss = alone(resumed, folder, args.lanes, args.batch, 1)
        select_s, select_rss, select_peak, weight = alone(selected, folder)
        _, chosen_rss = alone(resumed, folder, args.lanes, args.batch, 1, weight)
    chosen = {"select_s": select_s, "select_rss_mib": select_rss, "select_peak_mib": select_peak}
    chosen["chosen_rss_mib"] = chosen_rss
    keys = {"open_s": open_s, "open_rss_mib": open_rss, "resume_s": resume_s, "reader_rss_mib": reader_rss}
    sizes = {name: getattr(args, name) for name in ("images", "shards", "lanes", "batch")}
    common.show(keys | chosen | made | sizes, as_json=args.json)


def alone(function: Callable[..., T], *given: object) -> T:
    """The result of a new process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, given)


def opened(folder: str) -> tuple[float, float]:
    """Seconds and MiB."""
    before, begin = memory.of(), time.perf_counter()
    index = open_index(folder, note=common.note)
    seconds, after = time.perf_counter() - begin, memory.of()
    assert len(index)
    return seconds, after.rss - before.rss


def selected(folder: str) -> tuple[float, float, float, bytes]:
    """Seconds, MiB in the end and at most, and the weights."""
    import duckdb  # noqa: F401  # as everything else, before the clock starts

    before, begin = memory.of(), time.perf_counter()
    source = Source(url=folder, where="bytes > 60000 and label % 3 <> 1", weight="1 / sqrt(1 + label % 7)")
    selection = select(open_index([source], note=common.note))
    seconds, after = time.perf_counter() - begin, memory.of()
    assert selection
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    return seconds, after.rss - before.rss, peak - before.rss, selection.weight.tobytes()


def resumed(folder: str, lanes: int, batch: int, owned: int, weight: bytes = b"") -> tuple[float, float]:
    """Seconds from the index on, and MiB with it, for a reader of the first `owned` lanes."""
    before = memory.of()
    index = open_index(folder, note=common.note)
    begin = time.perf_counter()
    selection = Selection(np.frombuffer(weight, np.float32)) if weight else None
    stream = Stream(index, Views.of([View()]), seed=0, lanes=lanes, batch=batch, selection=selection)
    samples = stream.samples(range(owned), start=stream.steps_per_epoch // 2)
    next(samples)
    seconds = time.perf_counter() - begin
    for _ in itertools.islice(samples, batch // lanes * owned):  # the blocks of the first steps have come
        pass
    return seconds, memory.of().rss - before.rss


def write(folder: str, images: int, shards: int) -> None:
    indexing.save(folder, list(tables(Path(folder), images, shards)))


def tables(folder: Path, images: int, shards: int) -> Iterator[tuple[Blob, pa.Table]]:
    """Sparse tars and what an index says of them: as many images of each class, in random order."""
    rng = np.random.default_rng(0)
    sizes = rng.lognormal(np.log(MEAN) - SPREAD**2 / 2, SPREAD, 1000).astype(np.int64)  # that an image may have
    checksums = np.array([zlib.crc32(bytes(int(n))) for n in sizes], np.uint32)
    for number, n in enumerate(np.diff(np.arange(shards + 1) * images // shards)):
        kind = rng.integers(0, len(sizes), n)
        members = 512 + (sizes[kind] + 511) // 512 * 512  # a header, and the image filled up with zeros
        ends = np.cumsum(members)
        label = rng.integers(0, CLASSES, n)
        named = zip(label.tolist(), rng.integers(0, 50_000, n).tolist(), strict=True)
        key = [f"n{1_440_764 + 571 * c:08d}_{i}" for c, i in named]
        path = folder / f"train-{number:06d}.tar"
        with path.open("wb") as tar:
            tar.truncate(int(ends[-1]) + 1024)
        columns = [key, ends - members + 512, sizes[kind], label, checksums[kind], pa.nulls(n)]
        table = pa.table([pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)], SCHEMA)
        yield Blob(str(path), path.stat().st_size), table


if __name__ == "__main__":
    common.run(main)
