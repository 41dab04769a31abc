"""What a reader of the documentation has, where the recipes of papers train in seconds: images and runs in every place
that a page names, and a store whose buckets hold the same."""

import functools
import json
import re
import shutil
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from helpers.drloc_sets import cifar_100
from helpers.labelled_images import draw
from helpers.layouts import fill, tar_bytes, write_parquet
from helpers.pages import Command
from helpers.pictures import encode, jpeg, write_tar
from helpers.public_sets import devkit, imagenet, kaggle, openimages, validation, webvision
from helpers.recipes import small_recipe
from helpers.suite_sets import dtd
from helpers.tiffs import scene, tiff

from eagleray.config import bundled, yaml_text
from eagleray.storage import store

# What a command has that needs GPUs, many images or a reader's own name, and what stands for it here.
INSTEAD = {
    r" workers=\d+( gpus=true)?": " workers=0",
    r" --workers \d+ --gpus": "",
    r" gpus=true": "",
    r"(?<=\.\.)\d{5,6}(?=\})": "000001",
    r"\b(index) URL": r"\1 s3://bucket/train",
    r"--(train|test) URL": r"--\1 labelled/\1",
    r"data\.(train|test)=SHARDS": r"data.\1=labelled/\1",
    r"\b(report) OUT": r"\1 runs/mine",
    r"\b(data stats) DST": r"\1 shards/",
    r"\bROOT\b": "suite",
    r"\bRECIPE\b": "dino_vits16_in1k_ep100",
    r"--batch 1024": "--batch 32",
}
ORIGINAL = bundled.tree
RUNS = (
    "a",
    "dino",
    "first",
    "dino_vitb16",
    "mocov3_vitb16_in1k_ep300",
    "esvit_swint_in1k_ep300",
    "esvit_swins_in1k_ep300",
)


def adapted(command: Command) -> list[str]:
    """Return the words of a command after `eagleray`, with small things in the place of large ones."""
    text = command.text
    for pattern, small in INSTEAD.items():
        text = re.sub(pattern, small, text)
    return Command(command.page, text, whole=True).words()


@functools.cache
def shipped(name: str) -> dict[str, Any]:
    """Return the keys of a shipped recipe at the size of a test; data, classes and views of its own channels stay."""
    own = ORIGINAL(name)
    tree: Any = yaml_text.parse(small_recipe(own["method"]["name"]))
    tree["data"] |= {k: v for k, v in own.get("data", {}).items() if k in ("train", "test")}
    tree["method"] |= {k: v for k, v in own["method"].items() if k == "classes"}
    return dict(tree)


def labelled(folder: Path, count: int) -> None:
    """Write images of six classes with what img2dataset says of them, as two shards."""
    x, y = draw(0, count)
    for shard in range(2):
        members = []
        for i in range(shard, count, 2):
            said = {"similarity": i / count, "NSFW": "UNLIKELY", "caption": f"image {i}"}
            parts = {"jpg": encode(x[i]), "cls": b"%d" % y[i], "json": json.dumps(said).encode()}
            members += [(f"{i:09d}.{kind}", data) for kind, data in parts.items()]
        write_tar(folder / f"train-{shard:06d}.tar", members)


def lay_out(home: Path) -> None:
    """Fill a folder with what the commands of the pages read."""
    for split, count in ("train", 160), ("test", 48):
        labelled(home / "labelled" / split, count)
    for place in ("data/imagenet-1k", "cifar10"):
        shutil.copytree(home / "labelled", home / place)
    (home / "data" / "imagenet-1k" / "test").rename(home / "data" / "imagenet-1k" / "val")
    for shard in (home / "cifar10" / "test").iterdir():
        shard.rename(home / "cifar10" / shard.name.replace("train", "test"))
    for shard in (home / "cifar10" / "train").iterdir():
        shard.rename(home / "cifar10" / shard.name)
    for place in ("shards", "shards/a", "shards/b", "shards/train"):
        shutil.copytree(home / "labelled" / "train", home / place, dirs_exist_ok=True)
    fill(home / "photos", [f"{i}.jpg" for i in range(140)])
    (home / "bands").mkdir()
    for i in range(64):
        (home / "bands" / f"{i}.tif").write_bytes(tiff(np.concatenate([scene(i)] * 3, 2)[..., :13]))
    channels = 13 * [{"mean": 1000.0, "std": 300.0}]
    views = [{"count": 2, "size": 16, "gray": 0, "strength": [0.8, 0.8, 0, 0], "blur": 0.5}]
    bands = {"base": "simclr_resnet50_in1k_ep800", "data": {"channels": channels}, "views": views}
    (home / "bands.yaml").write_text(yaml.safe_dump(bands))
    (home / "1percent.txt").write_text("".join(f"n01440764_{i:09d}.JPEG\n" for i in range(12)))
    for name in ("my_recipe.yaml", "mine.yaml"):
        (home / name).write_text("base: supervised_vitb16_cifar100_ft100\nmethod: {classes: 6}\n")
    dtd(home / "dtd", "train")
    cifar_100(home, "train")


def public_sets(home: Path) -> None:
    """Lay out the archives of docs/prepare.md."""
    imagenet(home, "folder of the tar")
    imagenet(home, "tar of tars")
    validation(home)
    devkit_of = home / "kit"
    devkit_of.mkdir()
    with tarfile.open(home / "ILSVRC2012_devkit_t12.tar.gz", "w:gz") as tar:
        tar.add(devkit(devkit_of), "ILSVRC2012_devkit_t12")
    kaggle(home)
    images = home / "ILSVRC" / "Data" / "CLS-LOC"
    imagenet_val = {f"ILSVRC2012_val_{i:08d}.JPEG" for i in range(1, 7)}
    fill(images / "val", sorted(imagenet_val))
    openimages(home)
    webvision(home / "webvision")
    fill(home / "coco", [f"train2017/{i:012d}.jpg" for i in range(6)])
    (home / "coco" / "annotations").mkdir()
    write_parquet(home / "datasets" / "food101" / "data" / "train-0.parquet", 0, 8)
    for i in range(2):
        members = {f"{i}{j}.jpg": jpeg(100 * i + j) for j in range(4)}
        (home / f"part-{i:05d}.tar").write_bytes(tar_bytes(members))


def fill_store(home: Path) -> None:
    """Fill the buckets that the pages name."""
    train = sorted((home / "labelled" / "train").glob("*.tar"))
    for url in ("s3://bucket/train", "s3://c/y"):
        upload(url, train)
    store.store("s3://b").put("s3://b/x-000000.tar", train[0])
    store.store("s3://b").put("s3://b/x-000001.tar", train[1])
    upload("s3://bucket/raw", home.glob("part-*.tar"))
    upload("s3://mirror/openimages", (home / "mirror").iterdir())


def upload(url: str, files: Iterable[Path]) -> None:
    for path in files:
        store.store(url).put(f"{url}/{path.name}", path)
