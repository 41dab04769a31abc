"""The parts that trust_cost.py measures, with the eagleray that is first on the path: nothing here is imported."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path


def measure(part: str, folder: Path, name: str, images: int) -> None:
    """Run a part with the eagleray that is first on the path, and print its CPU and wall seconds."""
    work: Callable[[], object] = {"loader": load, "index": index, "prepare": prepare}[part](folder, name, images)
    began, cpu = time.perf_counter(), time.process_time()
    work()
    print(json.dumps([time.process_time() - cpu, time.perf_counter() - began]))


def load(folder: Path, name: str, images: int) -> Callable[[], object]:
    import torch

    from eagleray.config.view import View
    from eagleray.data.index import open_index
    from eagleray.data.reader import Stream
    from eagleray.views.sampling import Views

    torch.set_num_threads(1)
    batch = min(64, images)
    views = (View(size=224, scale=(0.4, 1.0), count=2), View(size=96, scale=(0.05, 0.4), count=8))
    found = open_index(str(folder / "shards"), folder / name / "spare", note=lambda _: None)
    stream = Stream(found, Views.of(views), seed=0, lanes=1, batch=batch)
    parts = stream.parts(range(1), start=0)
    next(parts)
    return lambda: [next(parts) for _ in range(images // batch)]


def index(folder: Path, name: str, images: int) -> Callable[[], object]:
    from eagleray.data.index import open_index

    copy = folder / name / "shards"
    copy.mkdir(parents=True)
    for path in (folder / "shards").glob("*.tar"):
        (copy / path.name).symlink_to(path)
    return lambda: open_index(str(copy), folder / name / "spare", note=lambda _: None)


def prepare(folder: Path, name: str, images: int) -> Callable[[], object]:
    from eagleray.datasets.prepare import prepare
    from eagleray.datasets.sources.source import PrepareOptions

    destination = folder / name / "prepared"
    options = PrepareOptions(source="folder", origin=str(folder / "images"), destination=str(destination), size=16)
    return lambda: prepare(options, run=map, command="", note=lambda _: None, tick=lambda *_: None)


if __name__ == "__main__":
    measure(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
