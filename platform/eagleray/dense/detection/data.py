"""Read images with boxes and masks in COCO's layout, file by file and in any order.

Shards are not used: a shard has one label for an image, while here an image has many objects, and images are few."""

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from eagleray.base.errors import UserError, explained
from eagleray.data.decode import BadImage, decode
from eagleray.dense.detection.coco_values import is_mask, is_numbers, shown, wrong_values
from eagleray.dense.detection.scores import area, to_mask

FOLDERS = ("images", "{}2017", "images/{}2017", "{}")  # folders that may hold the images of split {}
CROP_SHORTS, CROP_LONGEST, CROP_SIDES = (400, 500, 600), 1333, (384, 600)  # pixels; `draw_crop` explains them
KEYS = {
    "images": ("id", "file_name", "height", "width"),
    "categories": ("id", "name"),
    "annotations": ("image_id", "category_id", "bbox", "segmentation"),
}


class Example(NamedTuple):
    """An image with n objects."""

    image: Tensor  # uint8 (3, H, W)
    target: dict[str, Tensor]  # boxes (n, 4): x0 y0 x1 y1 in pixels; labels (n,), from 1; masks (n, H, W), 0 or 1


@dataclass(frozen=True)
class Coco(Dataset[Example]):
    """A split of a dataset in COCO's layout.

    Classes are numbered from 1 in the order of their category ids, which may have gaps; 0 is the background."""

    file: Path
    tree: dict[str, list[dict[str, Any]]]  # content of `file`; each annotation has `id`, `area` and `iscrowd`
    paths: list[Path]  # files of the images
    objects: list[list[dict[str, Any]]]  # annotations of each image, crowds included
    categories: dict[int, str]  # names of categories by id, in ascending order
    flip: bool = False  # whether a random half of the images is mirrored, for training
    crop: int | None = None  # seed with which a random half of the images is cropped, for training; None: no crops

    @classmethod
    def of(cls, folder: Path, split: str) -> "Coco":
        """Open the split `train` or `val` of a folder that contains annotations/ and images.

        Raises UserError when files are missing or the annotations are not in COCO's format."""
        names = [f"annotations/instances_{split}{year}.json" for year in ("", "2017")]
        file = next((folder / n for n in names if (folder / n).is_file()), None)
        if file is None:
            raise UserError(f"--coco {folder}: has neither {names[0]} nor {names[1]}")
        tree = load_annotations(file)
        objects: list[list[dict[str, Any]]] = [[] for _ in tree["images"]]
        for annotation in tree["annotations"]:
            objects[annotation["image_id"] - 1].append(annotation)
        categories = {c["id"]: c["name"] for c in sorted(tree["categories"], key=lambda c: c["id"])}
        return cls(file, tree, image_paths(folder, split, file, tree["images"]), objects, categories)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, at: tuple[int, int] | int) -> Example:
        """Read image `i`, or with `(i, epoch)` image `i` as it is mirrored and cropped at random in this epoch.

        Raises UserError as `image` does."""
        i, epoch = at if isinstance(at, tuple) else (at, 0)
        image, target, info = self.image(i), self.target(i), self.tree["images"][i]
        if self.flip and np.random.default_rng((i, epoch)).random() < 0.5:
            image, target = mirror(image, target)
        if self.crop is not None:
            rng = np.random.default_rng((self.crop, epoch, i, 1))  # 1: NumPy ignores zeros at the end, such as i = 0
            if rng.random() < 0.5:
                return cut(image, target, draw_crop(rng, (info["height"], info["width"])))
        return Example(image, target)

    def image(self, i: int) -> Tensor:
        """Read image i (3, H, W), uint8.

        Raises UserError when it cannot be read, or does not have the size that the annotations state."""
        image, info = read_image(self.paths[i]), self.tree["images"][i]
        if image.shape[1:] != (info["height"], info["width"]):
            size = f"{image.shape[2]} x {image.shape[1]}"
            raise UserError(f"{self.paths[i]}: has {size} pixels; {self.file} says {info['width']} x {info['height']}")
        return image

    def trainable(self) -> list[int]:
        """Return the indices of the images that have an object to train on."""
        return [i for i in range(len(self)) if self.trainable_objects(i)]

    def trainable_objects(self, i: int) -> list[tuple[dict[str, Any], list[float]]]:
        """Return the annotations of image i to train on, each with its box x0 y0 x1 y1, clipped to the image.

        Crowds, and boxes less than a pixel wide or high, are left out."""
        info, out = self.tree["images"][i], []
        for annotation in self.objects[i]:
            x, y, w, h = annotation["bbox"]
            x0, y0, x1, y1 = max(x, 0), max(y, 0), min(x + w, info["width"]), min(y + h, info["height"])
            if not annotation["iscrowd"] and x1 - x0 >= 1 and y1 - y0 >= 1:
                out.append((annotation, [x0, y0, x1, y1]))
        return out

    def target(self, i: int) -> dict[str, Tensor]:
        """Return the boxes, labels and masks of image i in the form that Example describes."""
        info, objects = self.tree["images"][i], self.trainable_objects(i)
        classes = {c: y for y, c in enumerate(self.categories, 1)}
        masks = torch.zeros(len(objects), info["height"], info["width"], dtype=torch.uint8)
        for mask, (annotation, _) in zip(masks, objects, strict=True):
            mask.copy_(torch.from_numpy(to_mask(annotation["segmentation"], info["height"], info["width"])))
        return {
            "boxes": torch.tensor([box for _, box in objects], dtype=torch.float32).view(-1, 4),
            "labels": torch.tensor([classes[a["category_id"]] for a, _ in objects], dtype=torch.int64),
            "masks": masks,
        }


def mirror(image: Tensor, target: dict[str, Tensor]) -> Example:
    """Mirror an image (3, H, W) and its objects."""
    width = image.shape[2]
    x0, y0, x1, y1 = target["boxes"].unbind(1)
    boxes = torch.stack([width - x1, y0, width - x0, y1], 1)
    return Example(image.flip(2), {**target, "boxes": boxes, "masks": target["masks"].flip(2)})


def draw_crop(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return a random part x0 y0 x1 y1 of an image of `shape` (H, W), to which it is cropped.

    As in DETR (Carion et al. 2020, arXiv:2005.12872) and the Swin and SelfPatch detectors, the sides are 384 to 600
    pixels of an image whose short side is resized to 400, 500 or 600 pixels. Here the image is not resized before the
    crop, so that its pixels are interpolated only once, by the resize that follows."""
    scale = min(rng.choice(CROP_SHORTS) / min(shape), CROP_LONGEST / max(shape))
    ranges = []
    for pixels in shape:
        side = max(round(pixels * scale), 1)
        length = rng.integers(min(side, CROP_SIDES[0]), min(side, CROP_SIDES[1]) + 1)
        first = rng.integers(0, side - length + 1)
        ranges.append((int(first / scale), min(math.ceil((first + length) / scale), pixels)))
    (y0, y1), (x0, x1) = ranges
    return x0, y0, x1, y1


def cut(image: Tensor, target: dict[str, Tensor], part: tuple[int, int, int, int]) -> Example:
    """Crop an image (3, H, W) and its objects to the part x0 y0 x1 y1.

    Objects whose box is then less than a pixel wide or high are left out, so the result may have no objects."""
    x0, y0, x1, y1 = part
    shift = torch.tensor([x0, y0, x0, y0], dtype=torch.float32)
    boxes = (target["boxes"] - shift).clamp(min=0).minimum(torch.tensor([x1 - x0, y1 - y0] * 2, dtype=torch.float32))
    kept = (boxes[:, 2:] - boxes[:, :2] >= 1).all(1)
    masks = target["masks"][kept, y0:y1, x0:x1]
    return Example(image[:, y0:y1, x0:x1], {"boxes": boxes[kept], "labels": target["labels"][kept], "masks": masks})


def read_image(path: Path) -> Tensor:
    """Read an image (3, H, W), uint8.

    Raises UserError when it cannot be read or does not decode."""
    with explained(f"{path}: cannot be read", OSError, BadImage):
        return decode(path.read_bytes())


def load_annotations(file: Path) -> dict[str, list[dict[str, Any]]]:
    """Read a COCO file, and number its images and annotations from 1, as COCO's code needs: no texts and no id 0.

    Raises UserError, which names the first problem, when the file is not valid."""
    with explained(f"{file}: cannot be read as JSON", OSError, ValueError, RecursionError):
        tree = json.loads(file.read_text())
    for problem in problems(tree):
        raise UserError(f"{file}: {problem}")
    images = {i["id"]: (number, i["height"], i["width"]) for number, i in enumerate(tree["images"], 1)}
    for number, a in enumerate(tree["annotations"], 1):
        a["id"], a["iscrowd"], (a["image_id"], *size) = number, int(a.get("iscrowd", 0)), images[a["image_id"]]
        a.setdefault("area", area(a["segmentation"], *size))
    tree["images"] = [image | {"id": number} for number, image in enumerate(tree["images"], 1)]
    return {key: tree[key] for key in KEYS}


def problems(tree: Any) -> Iterator[str]:
    """Yield each problem in the content of a COCO file as one line of text."""
    for key, needed in KEYS.items():
        rows = tree.get(key) if isinstance(tree, dict) else None
        if not isinstance(rows, list):
            yield f"has no list `{key}`; expected COCO's lists `images`, `annotations` and `categories`"
        for i, row in enumerate(rows or []):
            missing = [k for k in needed if not isinstance(row, dict) or k not in row]
            if missing:
                yield f"{key}[{i}] has no {missing[0]}"
    yield from wrong_values(tree)
    for key, needed in KEYS.items():
        ids = [row["id"] for row in tree[key]] if "id" in needed else []
        if len(set(ids)) < len(ids):
            yield f"two {key} have the same id"
    if not any(not a.get("iscrowd", 0) for a in tree["annotations"]):
        yield "has no objects; expected annotations that are not crowds"
    sizes = {i["id"]: [i["height"], i["width"]] for i in tree["images"]}
    categories = {c["id"] for c in tree["categories"]}
    for i, a in enumerate(tree["annotations"]):
        if a["image_id"] not in sizes:
            yield f"annotations[{i}] has the image {a['image_id']}, which is not among the images"
        if a["category_id"] not in categories:
            yield f"annotations[{i}] has the category {a['category_id']}, which is not among the categories"
        if not is_numbers(a["bbox"], 4) or len(a["bbox"]) != 4:
            yield f"annotations[{i}].bbox is {shown(a['bbox'])}, expected [x, y, width, height]"
        if not is_mask(a["segmentation"], sizes[a["image_id"]]):
            yield f"annotations[{i}].segmentation is neither polygons nor run lengths of a mask of the image's size"


def image_paths(folder: Path, split: str, file: Path, images: Sequence[dict[str, Any]]) -> list[Path]:
    """Return the paths of all images of a split. Raises UserError when an image is missing."""
    folders = [folder / name.format(split) for name in FOLDERS]
    images_folder = next((p for p in folders if os.path.isfile(p / images[0]["file_name"])), folders[0])
    paths = [images_folder / image["file_name"] for image in images]
    missing = [image["file_name"] for image, path in zip(images, paths, strict=True) if not os.path.isfile(path)]
    if missing:
        name = images_folder / missing[0][:100]
        raise UserError(f"{name}: no such image; {len(missing)} of the {len(paths)} in {file} are missing")
    return paths
