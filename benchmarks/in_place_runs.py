"""The runs of `in_place.py`: the same steps from tars, Parquet files and loose objects, each killed once."""

import os
import sys
from pathlib import Path
from typing import Any

import common
import pyarrow as pa
import pyarrow.parquet as pq
import torch

import eagleray
from eagleray.base.files import read_lines
from eagleray.data.index import open_index
from eagleray.datasets.shards import Sample, write_shards
from eagleray.engine import checkpoint
from eagleray.storage import store
from eagleray.storage.ordered_map import ordered_map

IMAGES = 320  # so small that they are one block, however they are stored


def train_each(bucket: str, folder: Path, steps: int) -> dict[str, Any]:
    """Store the same photographs in three ways, train on each for so many steps, and kill each run about in its middle.
    Returns at which step it was killed, and whether its weights are those of a run on the tars that nobody killed."""
    sys.path.append(str(common.ROOT / "tests"))
    from helpers.recipes import SMALL

    recipe, urls = folder / "small.yaml", put(bucket, folder)
    recipe.write_text(SMALL)
    keys = ["data.test=null", f"optim.epochs={-(-steps * 32 // IMAGES)}", f"max_steps={steps}", "checkpoint.steps=10"]
    os.environ["MLFLOW_TRACKING_URI"] = "none"
    want = weights(eagleray.pretrain(str(recipe), [f"data.train={urls['tars']}", *keys], out=folder / "whole").folder)
    found: dict[str, Any] = {"steps": steps}
    for name, url in urls.items():
        out = folder / name
        words = [f"data.train={url}", *keys]
        found[f"killed_at_{name}"] = kill(str(recipe), [*words, f"out={out}"], out, steps // 2)
        got = weights(eagleray.pretrain(str(recipe), words, out=out).folder)
        same = got.keys() == want.keys() and all(torch.equal(value, want[key]) for key, value in got.items())
        found[f"equal_weights_{name}"] = same and read_lines(out / "metrics.jsonl")[-1]["step"] == steps
        common.note(f"{name}: killed at step {found[f'killed_at_{name}']}, equal weights: {same}")
    return found


def put(bucket: str, folder: Path) -> dict[str, str]:
    """Put photographs into the bucket as loose objects, and in their order into a tar and a Parquet file."""
    from helpers.pictures import jpeg

    def put_one(number: int) -> None:
        url = f"{bucket}/few/p{number:04d}.jpg"
        store.store(url).write(url, jpeg(number))

    for _ in ordered_map(put_one, range(IMAGES)):
        pass
    index = open_index(f"{bucket}/few", note=common.note)
    files = [bytes(index.read(number, number + 1)) for number in range(len(index))]
    write_shards((Sample(f"{n:04d}", "jpg", file) for n, file in enumerate(files)), str(folder / "few"), size=2**30)
    pq.write_table(pa.table({"image": [{"bytes": file, "path": None} for file in files]}), folder / "few.parquet")
    [tar] = (folder / "few").glob("*.tar")
    places = {"tars": (tar, "few-tars/x.tar"), "parquet": (folder / "few.parquet", "few-parquet/x.parquet")}
    for path, key in places.values():
        store.store(bucket).put(f"{bucket}/{key}", path)
    return {"tars": f"{bucket}/few-tars", "parquet": f"{bucket}/few-parquet", "loose": f"{bucket}/few"}


def kill(recipe: str, words: list[str], out: Path, step: int) -> int:
    """Start `eagleray pretrain`, kill it after a step, and return the last step in its history."""
    from helpers.runs import start, wait_for_step

    process = start([recipe, *words])
    wait_for_step(out, step, process)
    process.kill()
    process.communicate()
    return int(read_lines(out / "metrics.jsonl")[-1]["step"])


def weights(folder: Path) -> dict[str, torch.Tensor]:
    state = checkpoint.newest(Path(folder) / "checkpoints")
    assert state is not None
    found: dict[str, torch.Tensor] = state["method"]
    return found
