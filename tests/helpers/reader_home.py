"""What a reader of the documentation has, where the recipes of papers train in seconds: images and runs in every place
that a page names, and a store whose buckets hold the same."""

import functools
import json
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import yaml
from helpers.annotated import coco
from helpers.drloc_sets import cifar
from helpers.labelled_images import draw
from helpers.layouts import fill, tar_bytes, write_parquet
from helpers.pages import ROOT, Command
from helpers.pictures import encode, jpeg, write_tar
from helpers.public_sets import IDS, imagenet, kaggle, openimages, packed_devkit, validation, webvision
from helpers.recipes import small_recipe
from helpers.suite_sets import in_lists
from helpers.tiffs import scene, tiff
from safetensors.torch import save_file

from eagleray.api.data import prepare
from eagleray.config import bundled, yaml_text
from eagleray.runs import recipe
from eagleray.runs.build import build_method
from eagleray.storage import store

PUBLIC = r"start\.from=(?:timm:|docs/backbone)\S*"  # weights of a size that no small recipe has
# What a command has that needs GPUs, many images or a reader's own name, and what stands for it here.
INSTEAD = {
    r"(submit evaluate .*) --gpus \d+": r"\1 --workers 1",
    r" --gpus \d+": "",
    r" workers=\d+( gpus=true)?": " workers=0",
    r" --workers \d+ --gpus": "",
    r" gpus=true": "",
    r"method\.classes=10\b": "method.classes=6",  # of `labelled`
    r"\bBUCKET\b": "bucket",
    r"\$PWD/photos": "s3://bucket/train",
    r"\$PWD": "s3://bucket",
    r"(submit tune cifar10_small)": r"\1 sweep.trials=2",
    r"(tune cifar10_small)": r"\1 monitor.every=4 monitor.bank=512",  # a trial takes 20 steps
    r"(tune imagenet_methods)": r"\1 workers=0 optim.batch=32 optim.epochs=2 evaluate.every=1 sweep.trials=2",
    r"(tune mocov3_figure5)": r"\1 workers=0 optim.epochs=1",
    r"(submit finetune \S+) RECIPE": r"\1 tuned.yaml data.test=s3://bucket/val",
    r"(0+)\.\.(\d+)(?=\})": r"\1..1",  # two shards
    r"\b(index) URL": r"\1 s3://bucket/train",
    r"--(train|test) URL": r"--\1 labelled/\1",
    r"data\.(train|test)=SHARDS": r"data.\1=labelled/\1",
    r"\b(report) OUT": r"\1 runs/mine",
    r"\b(report) SWEEP": r"\1 sweeps/mine",
    r"BACKBONE (.*) --coco DIR --schedule 1x": r"runs/mine \1 --coco squares --schedule squares/schedule.yaml",
    r"\b(data stats) DST": r"\1 shards/",
    r"\bROOT\b": "suite",
    r"\bRECIPE\b": "dino_vits16_in1k_ep100",
    r"timm:swin_(small|tiny)_patch4_window7_224(\.ms_in1k)?": "runs/mine",
    r"timm:vit_small_patch16_dinov3\.lvd1689m": "runs/mine",
    r"(evaluate timm:\S+ --train labelled)/train(?! --test)": r"\1/test",
    rf"({PUBLIC})": r"\1 workers=0 data.lanes=8 data.workers=0 optim.batch=8 max_steps=2 evaluate.limit=16",
    r"(continue_dinov3_vits16 .*) start\.freeze=\S+ method\.teacher_temp\.warmup=\S+": r"\1",
    r"size: 518": "size: 16",
    r"size: 98(.*)count: 8": r"size: 8\1count: 2",
    r"--batch 1024": "--batch 4",
    r"(--labels 1percent.txt)": r"\1 --batch 4",
    r"bytes > 20000": "bytes > 200",
    r"--min-side 64": "--min-side 16",
    r"--key \d+": "--key 000000012",
    r"min_side >= 200": "min_side >= 20",
    r"(linear_augmented@\w+)": r"\1 --batch 32",
    r"(data cluster \S+ \S+)": r"\1 --similar 1",  # few features of a small model differ by more
}
ORIGINAL = bundled.tree
BUCKETS = ("bucket", "other", "mirror", "open-images-dataset", "photos")
RUNS = (  # of MoCo v3, whatever their names say
    "mine",
    "a",
    "dino",
    "first",
    "dino_vitb16",
    "mocov3_vitb16_in1k_ep300",
    "esvit_swint_in1k_ep300",
    "esvit_swins_in1k_ep300",
)
# What a reader has written: fine-tuning on images of their own.
TUNED = "base: supervised_vitb16_cifar100_ft100\nmethod: {classes: 6}\ndata: {test: labelled/test}\n"
OTHER_RUNS = {"dino": "dino_swint_in1k_ep300", "dinov2": "dinov2_vitl14"}


def adapted(command: Command) -> list[str]:
    """Return the words of a command after `eagleray`, with small things in the place of large ones."""
    text = command.text
    for pattern, small in INSTEAD.items():
        text = re.sub(pattern, small, text)
    return Command(command.page, text, whole=True).words()


def recipes(command: Command) -> Callable[[str], dict[str, Any]]:
    """Return what reads the shipped recipes for a command: at the size of a test, but where it starts from public
    weights."""
    return ORIGINAL if re.search(PUBLIC, command.text) else shipped


def small(method: str) -> str:
    """The text of a recipe of a method on a ViT of four blocks, as protocols read the last four."""
    return small_recipe(method).replace("depth: 2, num_heads: 3", "depth: 4, num_heads: 3")


@functools.cache
def shipped(name: str) -> dict[str, Any]:
    """Return the keys of a shipped recipe at the size of a test; data, classes and views of its own channels stay."""
    own = ORIGINAL(name)
    tree: Any = yaml_text.parse(small(own["method"]["name"]))
    tree["data"] |= {k: v for k, v in own.get("data", {}).items() if k in ("train", "test")}
    tree["method"] |= {k: v for k, v in own["method"].items() if k == "classes"}
    if "teacher" in tree["method"]:
        tree["method"]["teacher"] = dict(tree["backbone"])
    return dict(tree)


def labelled(folder: Path) -> None:
    """Write images of six classes with what img2dataset says of them: train/ and test/ of two shards each."""
    for split, count in ("train", 640), ("test", 48):
        x, y = draw(0, count)
        for shard in range(2):
            members = []
            for i in range(shard, count, 2):
                said = {"similarity": i / count, "NSFW": "UNLIKELY", "caption": f"image {i}"}
                parts = {"jpg": encode(x[i]), "cls": b"%d" % y[i], "json": json.dumps(said).encode()}
                members += [(f"{i:09d}.{kind}", data) for kind, data in parts.items()]
            write_tar(folder / split / f"train-{shard:06d}.tar", members)


def lay_out(home: Path) -> None:
    """Fill a folder with what the commands of the pages read."""
    labelled(home / "labelled")
    for split, name in ("train", "train"), ("test", "val"):
        shutil.copytree(home / "labelled" / split, home / "data" / "imagenet-1k" / name)
        shutil.copytree(home / "labelled" / split, home / "data" / "cifar-10" / split)
    (home / "cifar10").mkdir()
    for split in "train", "test":
        for shard in (home / "labelled" / split).iterdir():
            shutil.copy(shard, home / "cifar10" / shard.name.replace("train", split))
    for split in "train", "test":
        shutil.copytree(home / "labelled" / split, home / "cifar10" / split)
    shutil.copytree(ROOT / "docs" / "backbone", home / "docs" / "backbone")
    coco(home / "squares")
    for place in ("shards", "shards/a", "shards/b", "shards/train"):
        shutil.copytree(home / "labelled" / "train", home / place, dirs_exist_ok=True)
    fill(home / "photos", [f"{i}.jpg" for i in range(140)])
    more = {"photo": [jpeg(i) for i in range(66)], "class_id": [i % 6 for i in range(66)]}
    write_parquet(home / "set" / "0.parquet", 0, 66, **more)
    (home / "1percent.txt").write_text("".join(f"{i:09d}.JPEG\n" for i in range(12)))
    (home / "tuned.yaml").write_text(TUNED)
    (home / "my_recipe.yaml").write_text("base: dino_vits16_in1k_ep100\ndata: {train: labelled/train}\n")
    (home / "takedown.csv").write_text("shard,key\ntrain-000000.tar,000000012\n")
    fill(home / "DAVIS" / "JPEGImages" / "480p" / "blackswan", [f"{i:05d}.jpg" for i in range(7)])
    bands(home)
    downloads(home)


def bands(home: Path) -> None:
    """Write images of 13 channels, and the recipe of docs/data.md for them."""
    (home / "bands").mkdir()
    for i in range(64):
        (home / "bands" / f"{i}.tif").write_bytes(tiff(np.concatenate([scene(i)] * 3, 2)[..., :13]))
    channels = 13 * [{"mean": 1000.0, "std": 300.0}]
    views = [{"count": 2, "size": 16, "gray": 0, "strength": [0.8, 0.8, 0, 0], "blur": 0.5}]
    recipe = {"base": "simclr_resnet50_in1k_ep800", "data": {"channels": channels}, "views": views}
    (home / "bands.yaml").write_text(yaml.safe_dump(recipe))


def downloads(home: Path) -> None:
    """Lay out DTD and CIFAR-100 as they are downloaded, and the shards of the latter, which recipes read."""
    classes = ["banded", "woven", "zigzagged"]
    dtd = {
        part: {f"{c}/{part}_{i}.jpg": (f"{c}/{part}_{i}.jpg", n) for n, c in enumerate(classes) for i in range(4)}
        for part in ("train", "val", "test")
    }
    in_lists(home / "dtd", dtd, "images", lambda part: [Path(f"labels/{part}1.txt")], "train")
    cifar(home, "train", fine=True, each=64)
    for split in "train", "test":
        prepare("cifar-100", home / "cifar-100-binary", home / "data" / "cifar-100" / split, split=split, workers=0)


def public_sets(home: Path) -> None:
    """Lay out the archives of docs/images.md."""
    imagenet(home, "folder of the tar")
    imagenet(home, "tar of tars")
    validation(home)
    packed_devkit(home)
    kaggle(home)
    fill(home / "ILSVRC" / "Data" / "CLS-LOC" / "val", [f"ILSVRC2012_val_{i:08d}.JPEG" for i in range(1, 7)])
    table, _, _ = openimages(home)
    shutil.copy(table, home / "train-images-boxable-with-rotation.csv")
    webvision(home / "webvision")
    fill(home / "coco", [f"train2017/{i:012d}.jpg" for i in range(6)])
    (home / "coco" / "annotations").mkdir()
    (home / "datasets" / "food101").mkdir(parents=True)
    write_parquet(home / "datasets" / "food101" / "data" / "train-0.parquet", 0, 8)
    for i in range(2):
        members = {f"{i}{j}.jpg": jpeg(100 * i + j) for j in range(4)}
        (home / f"part-{i:05d}.tar").write_bytes(tar_bytes(members))


def public_weights(hub: Path, home: Path) -> None:
    """Put a ViT-S of random weights into a cache of the Hub, and write a checkpoint of DINO as its authors do."""
    folder = hub / "models--timm--vit_small_patch16_224.dino"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit := 40 * "0")
    (folder / "snapshots" / commit).mkdir(parents=True)
    model = timm.create_model("vit_small_patch16_224", num_classes=0)
    save_file(model.state_dict(), folder / "snapshots" / commit / "model.safetensors")
    (home / "dino.yaml").write_text(small("dino"))
    teacher: Any = build_method(recipe.load(str(home / "dino.yaml"), [])).teacher
    weights = {f"backbone.{k}": v for k, v in teacher.backbone.model.state_dict().items()}
    for key, value in teacher.head.state_dict().items():
        key = key.replace("last.parametrizations.weight.original0", "last_layer.weight_g")
        weights[f"head.{key.replace('last.parametrizations.weight.original1', 'last_layer.weight_v')}"] = value
    checkpoint = {"student": {f"module.{k}": v for k, v in weights.items()}, "teacher": weights, "epoch": 1}
    torch.save(checkpoint, home / "dino_deitsmall16_pretrain_full_checkpoint.pth")


def fill_store(home: Path) -> None:
    """Put into the buckets what the pages read there, and nothing else."""
    for bucket in BUCKETS:
        clear(f"s3://{bucket}")
    train = sorted((home / "labelled" / "train").glob("*.tar"))
    for url in ("s3://bucket", "s3://bucket/train", "s3://other/y"):
        upload(url, train)
    for i, path in enumerate(train):
        store.store("s3://bucket").put(f"s3://bucket/x-{i:02d}.tar", path)
    upload("s3://photos/products", (home / "photos").glob("*.jpg"))
    upload("s3://bucket/photos", sorted((home / "photos").iterdir())[:64])
    upload("s3://bucket/set", (home / "set").iterdir())
    upload("s3://bucket/raw", home.glob("part-*.tar"))
    upload("s3://mirror/openimages", (home / "mirror").iterdir())
    upload("s3://open-images-dataset/train", (home / "mirror" / f"{name}.jpg" for name in IDS[:3]))


def clear(place: str) -> None:
    """Remove what an earlier command has left where one writes: in a folder, or below a URL."""
    if place.startswith("s3://"):
        for blob in store.store(place).list(f"{place}/"):
            store.store(place).delete(blob.url)
    else:
        shutil.rmtree(place, ignore_errors=True)


def written_by(words: list[str]) -> list[str]:
    """Return where a command writes what no earlier one may have left."""
    if words[0] in ("prepare", "shard"):
        return [words[2 if words[0] == "shard" else 3]]
    given = [word.removeprefix("out=") for word in words if word.startswith("out=")]
    if given or words[0] not in ("pretrain", "finetune", "tune"):
        return given
    recipe = words[2 if words[0] == "finetune" else 1]
    return [] if recipe.startswith("runs/") else [f"runs/{Path(recipe).stem}"]  # a run goes on where it is


def upload(url: str, files: Iterable[Path]) -> None:
    for path in files:
        store.store(url).put(f"{url}/{path.name}", path)
