"""Images per second from a real S3 server, beside raw GETs, WebDataset and mosaicml-streaming.

Starts the server of the tests on loopback, uploads shards of photographs that all differ, the same images in MDS, and
lets every reader, each in a process of its own, read epochs in alternating rounds. Ratios are taken within a round, as
the machine's speed changes from one to the next; medians of all rounds but the first, which fills what is warm. The
server runs on the cores of the readers, so ratios count, not rates.

share_of_raw           raw GETs of the ranges that ours reads, as many at a time / ours: seconds of an epoch
ratio_RIVAL_cold       images per second of ours / of the rival; files as they are, everything from the server
ratio_RIVAL_warm       the same with the node's cache, the rival's being full too
decoded_ratio_RIVAL    from the server through our decoder and two 224-pixel crops in two loader processes
bytes_per_epoch_ratio  fetched without a cache / bytes of the tars, the worst of 1, 2 and 4 readers
first_batch_block_reads[_RIVAL]   the first batch of files from the middle of an epoch, in times of one block's GET;
                       ours with two lanes, as it waits for a block of every lane that a reader owns
"""

import io
import json
import shutil
import statistics
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import common
import synthetic
from rivals import Task

from eagleray.base.errors import UserError
from eagleray.data.index import open_index
from eagleray.datasets.shards import Sample, write_shards
from eagleray.storage import store

SHARDS = 8
BUCKET = "s3://photographs"
RIVAL = "mosaicml-streaming==0.13.0"
# What `rivals.py` imports there, but numpy, of which the rival wants an older one than ours.
BESIDE = ("torch", "torchvision", "pillow", "pydantic", "pyyaml", "platformdirs")


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--data", help="folder or URL of shards whose JPEGs are used; default: synthetic ones")
    parser.add_argument("--images", type=int, default=4600, help="uploaded in 8 shards")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lanes", type=int, default=8)
    args = parser.parse_args()
    rival = str(common.environment(RIVAL, BESIDE))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        stack.enter_context(server(folder / "s3"))
        files = given(args.data) if args.data else [synthetic.picture(seed) for seed in range(min(args.images, 64))]
        shards = upload(folder / "local", files, args.images)
        sizes = {"images": args.images, "batch": args.batch, "lanes": args.lanes, "connections": 8, "workers": 2}
        task = Task(shards=shards, mds=f"{BUCKET}/mds", **sizes)
        readers = {
            name: stack.enter_context(Reader(name, task, rival if name == "streaming" else sys.executable))
            for name in ("ours", "raw", "webdataset", "streaming")
        }
        convert(readers["streaming"], folder / "local", task)
        shutil.rmtree(folder / "local")
        common.show(measure(readers, folder, args.rounds) | sizes | {"rounds": args.rounds}, as_json=args.json)


@contextmanager
def server(root: Path) -> Iterator[None]:
    """The tests' S3 server, with one empty bucket; the environment says where it is."""
    sys.path.append(str(common.ROOT / "tests"))
    import boto3
    import pytest
    from helpers.s3.server import point_at, running

    with ExitStack() as stack:
        try:
            swift = stack.enter_context(running(root))
        except pytest.skip.Exception as e:
            raise UserError(str(e)) from None
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        point_at(patch, swift.port)
        patch.setenv("S3_ENDPOINT_URL", f"http://127.0.0.1:{swift.port}")  # mosaicml-streaming's own name for it
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        boto3.client("s3").create_bucket(Bucket=BUCKET.removeprefix("s3://"))
        yield


def photographs(files: list[bytes], images: int) -> Iterator[Sample]:
    """JPEGs, no two alike: those that come back do so with another comment."""
    for number in range(images):
        data = files[number % len(files)]
        yield Sample(f"{number:08d}", "jpg", data[:2] + b"\xff\xfe\x00\x0a%08d" % number + data[2:])


def given(data: str) -> list[bytes]:
    files = []
    for blob in store.list_shards(data):
        with tarfile.open(fileobj=io.BytesIO(store.store(blob.url).get(blob.url))) as tar:
            members = (tar.extractfile(m) for m in tar if m.name.endswith((".jpg", ".jpeg")))
            files += [f.read() for f in members if f]
    if not files:
        raise UserError(f"--data={data}: no .jpg in these shards")
    return files


def upload(local: Path, files: list[bytes], images: int) -> list[str]:
    """Write shards and their index, and put them into the bucket. Returns their URLs there."""
    size = images * sum(map(len, files)) // len(files) // SHARDS
    write_shards(photographs(files, images), str(local), size=size + size // 20)
    open_index(str(local), note=common.note)
    put(local, f"{BUCKET}/train")
    return [f"{BUCKET}/train/{path.name}" for path in sorted(local.glob("*.tar"))]


def put(folder: Path, url: str) -> None:
    for path in sorted(folder.iterdir()):
        store.store(url).put(f"{url}/{path.name}", path)


Turn = Callable[[int], dict[str, Any]]  # of a round's number


class Reader:
    """A process of `rivals.py`, or of another program that answers as it does."""

    def __init__(self, name: str, task: Task, python: str, program: str = "rivals.py") -> None:
        self.name = name
        command = [python, str(Path(__file__).with_name(program)), name, json.dumps(asdict(task))]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()

    def __call__(self, what: str, **given: Any) -> Any:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps({"what": what} | given) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of {self.name} has ended; what it said is above")
        return json.loads(line)

    def turn(self, what: str, **given: Any) -> Turn:
        """What it does in a round."""
        return lambda number: self(what, number=number, **given)


def convert(streaming: Reader, local: Path, task: Task) -> None:
    """The shards' images, in MDS, in the bucket."""
    written = streaming("write", source=str(local), destination=str(local / "mds"))
    assert written == task.images
    put(local / "mds", task.mds)


def measure(readers: Mapping[str, Reader], folder: Path, rounds: int) -> dict[str, Any]:
    ours, raw = readers["ours"], readers["raw"]
    cached = {name: reader for name, reader in readers.items() if name != "raw"}
    for name in cached:
        (folder / "warm" / name).mkdir(parents=True)
    epochs = {name: reader.turn("epoch") for name, reader in readers.items()}
    epochs |= {f"{n}_warm": r.turn("epoch", folder=str(folder / "warm" / n)) for n, r in cached.items()}
    first = {f"{n}_first": r.turn("first") for n, r in cached.items()} | {"block": raw.turn("block")}
    decoded = {f"{n}_decoded": r.turn("decoded") for n, r in cached.items()}
    slow = {"streaming_decoded": decoded.pop("streaming_decoded")}
    found = alternate(epochs, rounds) | alternate(first, rounds) | alternate(decoded, rounds)
    found = {name: rows[1:] for name, rows in found.items()}
    # Of two the faster one, as mosaicml-streaming waits for 60 seconds at the start of some decoded rounds.
    found |= {name: [max(rows, key=lambda epoch: epoch.rate)] for name, rows in alternate(slow, 1).items()}
    times = {name: medians(rows) for name, rows in found.items()}
    block = times["block"].seconds

    def ratio(one: str, other: str) -> float:
        pairs = zip(found[one], found[other], strict=True)
        return statistics.median(a.rate / b.rate for a, b in pairs)

    seconds = zip(found["raw"], found["ours"], strict=True)  # a read of the raw ones is a range, not an image
    out = {"share_of_raw": statistics.median(raw.seconds / ours.seconds for raw, ours in seconds)}
    for rival in ("webdataset", "streaming"):
        for state, suffix in (("cold", ""), ("warm", "_warm")):
            out[f"ratio_{rival}_{state}"] = ratio(f"ours{suffix}", f"{rival}{suffix}")
    out["bytes_per_epoch_ratio"] = max(ours("fetched", readers=n) for n in (1, 2, 4))
    out["decoded_ratio_webdataset"] = ratio("ours_decoded", "webdataset_decoded")
    out["decoded_ratio_streaming"] = times["ours_decoded"].rate / times["streaming_decoded"].rate
    out["first_batch_block_reads"] = times["ours_first"].seconds / block
    out |= {f"first_batch_block_reads_{r}": times[f"{r}_first"].seconds / block for r in ("webdataset", "streaming")}
    rates = {f"{n}_images_per_s": times[n].rate for n in (epochs | decoded | slow) if n != "raw"}
    return out | rates | {"raw_mb_per_s": times["raw"].speed / 1e6, "block_ms": 1000 * block}


class Epoch(NamedTuple):
    """What a round took, or the medians of all."""

    seconds: float
    rate: float  # images per second
    speed: float  # bytes per second


def medians(rows: list[Epoch]) -> Epoch:
    return Epoch(*map(statistics.median, zip(*rows, strict=True)))


def alternate(turns: Mapping[str, Turn], rounds: int) -> dict[str, list[Epoch]]:
    """As `common.alternate`, with the clock in the reader's process. Returns what each round took, first the one that
    warms up."""
    found: dict[str, list[Epoch]] = {name: [] for name in turns}
    for number in range(rounds + 1):
        for name in list(turns)[:: -1 if number % 2 else 1]:
            t = turns[name](number)
            found[name].append(Epoch(t["seconds"], t["images"] / t["seconds"], t["bytes"] / t["seconds"]))
            common.note(f"round {number}: {name} {t['seconds']:.2f} s, {found[name][-1].speed / 1e6:.0f} MB/s")
    return found


if __name__ == "__main__":
    common.run(main)
