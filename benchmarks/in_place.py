"""Images per second of the same photographs on a real S3 server, as loose objects, in tars and in Parquet files.

Starts the server of the tests on loopback, uploads the photographs in these three ways, and lets a reader of each,
in a process of its own, read epochs in alternating rounds, as `streaming.py` does; with --rival also Hugging Face's
`datasets`, which streams the loose ones. The server runs on the cores of the readers, so ratios count, not rates.

ratio_tars             images per second of loose objects / of tars, both ours; files as they are
decoded_ratio_tars     the same through the decoder and two 224-pixel crops in two loader processes
parquet_ratio_tars     images per second of Parquet files, written as `datasets` writes them, / of tars
decoded_parquet_ratio_tars   the same through the decoder and the crops
ratio_datasets         images per second of ours / of `datasets`, both of loose objects, files as they are
index_images_per_s     of loose objects that are listed and read for the first time
killed_at_tars, ...    with --steps: step at which the run on tars, Parquet or loose objects was killed
equal_weights_tars, ...   whether, continued, it ends with the weights of a run on tars that nobody killed
"""

import itertools
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import common
import pyarrow as pa
import pyarrow.parquet as pq
import streaming
import synthetic
from in_place_runs import train_each
from rivals import Task
from streaming import BUCKET, Reader

from eagleray.data.index import open_index
from eagleray.storage import store
from eagleray.storage.ordered_map import ordered_map

RIVAL = "datasets==5.2.0 s3fs==2026.9.0"


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lanes", type=int, default=8)
    parser.add_argument("--rival", action="store_true", help=f"also {RIVAL}, in an environment of its own")
    parser.add_argument("--steps", type=int, help="also train for so many steps from each, killed in the middle")
    args = parser.parse_args()
    rival = str(common.environment(RIVAL, ("pillow",))) if args.rival else ""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        stack.enter_context(streaming.server(folder / "s3"))
        files = [synthetic.picture(seed) for seed in range(min(args.images, 64))]
        urls = {"tars": streaming.upload(folder / "local", files, args.images), "loose": [f"{BUCKET}/loose"]}
        put_each(files, args.images)
        urls["parquet"] = put_rows(folder, files, args.images)
        open_index(urls["parquet"], note=common.note)
        trained = train_each(BUCKET, folder, args.steps) if args.steps else {}
        sizes = {"images": args.images, "batch": args.batch, "lanes": args.lanes, "connections": 8, "workers": 2}
        began = time.perf_counter()
        open_index(urls["loose"], note=common.note)
        rate = args.images / (time.perf_counter() - began)
        readers = {
            n: stack.enter_context(Reader("ours", Task(u, "", **sizes), sys.executable)) for n, u in urls.items()
        }
        turns = {name: reader.turn("epoch") for name, reader in readers.items()}
        turns |= {f"{name}_decoded": reader.turn("decoded") for name, reader in readers.items()}
        if rival:
            theirs = Reader("datasets", Task(urls["loose"], "", **sizes), rival, "rival_datasets.py")
            turns["datasets"] = stack.enter_context(theirs).turn("epoch")
        found = {name: rows[1:] for name, rows in streaming.alternate(turns, args.rounds).items()}
        out = {f"{name}_images_per_s": statistics.median(r.rate for r in rows) for name, rows in found.items()}
        for name, one, other in (
            ("ratio_tars", "loose", "tars"),
            ("decoded_ratio_tars", "loose_decoded", "tars_decoded"),
            ("parquet_ratio_tars", "parquet", "tars"),
            ("decoded_parquet_ratio_tars", "parquet_decoded", "tars_decoded"),
            ("ratio_datasets", "loose", "datasets"),
        ):
            if other in found:
                pairs = zip(found[one], found[other], strict=True)
                out[name] = statistics.median(a.rate / b.rate for a, b in pairs)
        common.show(out | {"index_images_per_s": rate} | trained | sizes | {"rounds": args.rounds}, as_json=args.json)


def put_each(files: list[bytes], images: int) -> None:
    """Put photographs into the bucket, each as an object."""

    def put(sample: streaming.Sample) -> None:
        url = f"{BUCKET}/loose/{sample.key}.jpg"
        store.store(url).write(url, sample.data)

    for _ in ordered_map(put, streaming.photographs(files, images)):
        pass


def put_rows(folder: Path, files: list[bytes], images: int) -> list[str]:
    """Put photographs into the bucket in Parquet files of about the size of a tar, a hundred in a row group. Returns
    the URLs of the files."""
    samples, urls = streaming.photographs(files, images), []
    for number in range(streaming.SHARDS):
        rows = itertools.islice(samples, -(-images // streaming.SHARDS))
        cells = [{"bytes": sample.data, "path": f"{sample.key}.jpg"} for sample in rows]
        path, url = folder / "x.parquet", f"{BUCKET}/parquet/x-{number}.parquet"
        pq.write_table(pa.table({"image": cells}), path, row_group_size=100, compression="none", use_dictionary=False)
        store.store(url).put(url, path)
        urls.append(url)
    return urls


if __name__ == "__main__":
    common.run(main)
