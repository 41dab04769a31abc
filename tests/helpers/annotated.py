"""Tiny annotated sets: pictures of a square with a mask of its pixels, as videos, and in COCO's layout."""

import json
from pathlib import Path

import numpy as np
from PIL import Image


def square(place: int) -> tuple[Image.Image, Image.Image]:
    """Return an image of 32 x 32 pixels with a red square, and its mask of classes 0 and 1."""
    image, mask = np.full((32, 32, 3), 60, np.uint8), np.zeros((32, 32), np.uint8)
    part = slice(4 + 3 * place, 20 + 3 * place)
    image[part, part], mask[part, part] = (220, 40, 40), 1
    painted = Image.fromarray(mask, "P")
    painted.putpalette([0, 0, 0, 220, 40, 40])
    return Image.fromarray(image), painted


def masks(folder: Path, count: int = 2) -> Path:
    """Write some images and their masks, for training and for testing."""
    for split in ("train", "val"):
        for i in range(count):
            for kind, picture in zip(("images", "masks"), square(i), strict=True):
                (folder / kind / split).mkdir(parents=True, exist_ok=True)
                picture.save(folder / kind / split / f"{i}.png")
    return folder


def davis(folder: Path, *names: str) -> Path:
    """Write videos of three frames in which a square moves, with their masks."""
    names = names or ("square",)
    (folder / "ImageSets" / "2017").mkdir(parents=True)
    (folder / "ImageSets" / "2017" / "val.txt").write_text("\n".join(names) + "\n")
    for at, name in enumerate(names):
        for i in range(3):
            for kind, suffix, picture in zip(
                ("JPEGImages", "Annotations"), ("jpg", "png"), square(i + at), strict=True
            ):
                path = folder / kind / "480p" / name / f"{i:05d}.{suffix}"
                path.parent.mkdir(parents=True, exist_ok=True)
                picture.save(path)
    return folder


def coco(folder: Path, count: int = 2) -> Path:
    """Write images of a square with their annotations, for training and for testing, and a short schedule."""
    (folder / "images").mkdir(parents=True)
    (folder / "annotations").mkdir()
    for split, first in (("train", 0), ("val", count)):
        images, annotations = [], []
        for i in range(first, first + count):
            square(i % 4)[0].save(folder / "images" / f"{i}.png")
            images.append({"id": i, "file_name": f"{i}.png", "height": 32, "width": 32})
            a, b = 4 + 3 * (i % 4), 20 + 3 * (i % 4)
            annotations.append(
                {"id": i, "image_id": i, "category_id": 1, "bbox": [a, a, 16, 16], "area": 256, "iscrowd": 0}
                | {"segmentation": [[a, a, b, a, b, b, a, b]]}
            )
        tree = {"images": images, "annotations": annotations, "categories": [{"id": 1, "name": "square"}]}
        (folder / "annotations" / f"instances_{split}.json").write_text(json.dumps(tree))
    schedule = {"drop_path": 0.0, "sizes": [64], "longest": 64, "channels": 16, "regions": 16, "anchor": 4, "batch": 2}
    (folder / "schedule.yaml").write_text(json.dumps(schedule | {"epochs": 3, "lr": {"value": 1e-3}}))
    return folder
