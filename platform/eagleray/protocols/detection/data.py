"""Images with boxes and masks as COCO lays them out: files that are read one by one, in any order. Shards and their
stream are for images with one label; here an image has many objects of some kilobytes, and there are few images."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from eagleray.base.errors import UserError
from eagleray.data.decode import BadImage, decode
from eagleray.protocols.detection.scores import area, to_mask

FOLDERS = ("images", "{}2017", "images/{}2017", "{}")  # of a split's images
KEYS = {
    "images": ("id", "file_name", "height", "width"),
    "categories": ("id", "name"),
    "annotations": ("image_id", "category_id", "bbox", "segmentation"),
}


class Example(NamedTuple):
    """An image with n objects."""

    image: Tensor  # uint8 (3, H, W)
    target: dict[str, Tensor]  # boxes (n, 4) x0 y0 x1 y1 in pixels; labels (n,) from 1 on; masks (n, H, W), 0 or 1


@dataclass(frozen=True)
class Coco(Dataset[Example]):
    """A split. Its classes are counted from 1 on in the order of their ids, which may have gaps; 0 is no class."""

    file: Path
    tree: dict[str, list[dict[str, Any]]]  # what the file holds, each annotation with `id`, `area` and `iscrowd`
    paths: list[Path]  # of each image
    objects: list[list[dict[str, Any]]]  # of each image, crowds too
    categories: dict[int, str]  # names by id, in order of ids
    flip: bool = False  # half of the images, in training

    @classmethod
    def of(cls, folder: Path, split: str) -> "Coco":
        """`train` or `val` of a folder with annotations/ and images. Raises UserError."""
        names = [f"annotations/instances_{split}{year}.json" for year in ("", "2017")]
        file = next((folder / n for n in names if (folder / n).is_file()), None)
        if file is None:
            raise UserError(f"--coco {folder}: has neither {names[0]} nor {names[1]}")
        tree = checked(file)
        places = {image["id"]: i for i, image in enumerate(tree["images"])}
        objects: list[list[dict[str, Any]]] = [[] for _ in places]
        for annotation in tree["annotations"]:
            objects[places[annotation["image_id"]]].append(annotation)
        categories = {c["id"]: c["name"] for c in sorted(tree["categories"], key=lambda c: c["id"])}
        return cls(file, tree, found(folder, split, file, tree["images"]), objects, categories)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, at: tuple[int, int] | int) -> Example:
        """An image by its place, with the epoch that it is for where images are mirrored. Raises UserError."""
        place, epoch = at if isinstance(at, tuple) else (at, 0)
        image, info = read(self.paths[place]), self.tree["images"][place]
        if image.shape[1:] != (info["height"], info["width"]):
            size = f"{image.shape[2]} x {image.shape[1]}"
            raise UserError(f"{self.paths[place]}: is of {size} pixels, {self.file} says otherwise")
        target = self.target(place)
        if self.flip and np.random.default_rng((place, epoch)).random() < 0.5:
            return mirrored(image, target)
        return Example(image, target)

    def learnable(self) -> list[int]:
        """The images that show an object, crowds not counted."""
        return [i for i in range(len(self)) if self.kept(i)]

    def kept(self, place: int) -> list[tuple[dict[str, Any], list[float]]]:
        """The objects of an image to learn from, those at least a pixel wide and high, and their boxes inside it."""
        info, out = self.tree["images"][place], []
        for annotation in self.objects[place]:
            x, y, w, h = annotation["bbox"]
            x0, y0, x1, y1 = max(x, 0), max(y, 0), min(x + w, info["width"]), min(y + h, info["height"])
            if not annotation["iscrowd"] and x1 - x0 >= 1 and y1 - y0 >= 1:
                out.append((annotation, [x0, y0, x1, y1]))
        return out

    def target(self, place: int) -> dict[str, Tensor]:
        info, kept = self.tree["images"][place], self.kept(place)
        numbers = {c: i for i, c in enumerate(self.categories, 1)}
        masks = torch.zeros(len(kept), info["height"], info["width"], dtype=torch.uint8)
        for mask, (annotation, _) in zip(masks, kept, strict=True):
            mask.copy_(torch.from_numpy(to_mask(annotation["segmentation"], info["height"], info["width"])))
        return {
            "boxes": torch.tensor([box for _, box in kept], dtype=torch.float32).view(-1, 4),
            "labels": torch.tensor([numbers[a["category_id"]] for a, _ in kept], dtype=torch.int64),
            "masks": masks,
        }


def mirrored(image: Tensor, target: dict[str, Tensor]) -> Example:
    width = image.shape[2]
    x0, y0, x1, y1 = target["boxes"].unbind(1)
    boxes = torch.stack([width - x1, y0, width - x0, y1], 1)
    return Example(image.flip(2), {**target, "boxes": boxes, "masks": target["masks"].flip(2)})


def read(path: Path) -> Tensor:
    """uint8 (3, H, W). Raises UserError."""
    try:
        return decode(path.read_bytes())
    except OSError as e:
        raise UserError(f"{path}: cannot be read: {e.strerror}") from None
    except BadImage as e:
        raise UserError(f"{path}: is no image: {e}") from None


def checked(file: Path) -> dict[str, list[dict[str, Any]]]:
    """What a COCO file holds, with annotations numbered from 1 on (COCO's code takes 0 for none). Raises UserError."""
    try:
        tree = json.loads(file.read_text())
    except (OSError, ValueError) as e:
        raise UserError(f"{file}: is not JSON: {' '.join(str(e).split())}") from None
    for problem in problems(tree):
        raise UserError(f"{file}: {problem}")
    sizes = {i["id"]: (i["height"], i["width"]) for i in tree["images"]}
    for number, a in enumerate(tree["annotations"], 1):
        a["id"], a["iscrowd"] = number, int(a.get("iscrowd", 0))
        a.setdefault("area", area(a["segmentation"], *sizes[a["image_id"]]))
    return {key: tree[key] for key in KEYS}


def problems(tree: Any) -> Iterator[str]:
    """What is wrong with a COCO file."""
    for key, needed in KEYS.items():
        rows = tree.get(key) if isinstance(tree, dict) else None
        if not isinstance(rows, list):
            yield f"has no list of {key}, expected COCO's images, annotations and categories"
        for i, row in enumerate(rows or []):
            missing = [k for k in needed if not isinstance(row, dict) or k not in row]
            if missing:
                yield f"{key}[{i}] has no {missing[0]}"
        ids = [row["id"] for row in rows or []] if "id" in needed else []
        if len(set(ids)) < len(ids):
            yield f"two {key} have the same id"
    if not any(not a.get("iscrowd", 0) for a in tree["annotations"]):
        yield "has no object in it, expected annotations that are no crowds"
    sizes = {i["id"]: [i["height"], i["width"]] for i in tree["images"]}
    categories = {c["id"] for c in tree["categories"]}
    for i, a in enumerate(tree["annotations"]):
        if a["image_id"] not in sizes:
            yield f"annotations[{i}] is on image {a['image_id']}, which is not among the images"
        if a["category_id"] not in categories:
            yield f"annotations[{i}] is of category {a['category_id']}, which is not among the categories"
        if not numbers(a["bbox"], 4) or len(a["bbox"]) != 4:
            yield f"annotations[{i}].bbox is {a['bbox']}, expected [x, y, width, height]"
        if not drawn(a["segmentation"], sizes[a["image_id"]]):
            yield f"annotations[{i}].segmentation is neither polygons nor the runs of a mask of the image's size"


def numbers(value: Any, least: int) -> bool:
    return isinstance(value, list) and len(value) >= least and all(isinstance(v, int | float) for v in value)


def drawn(segmentation: Any, size: Sequence[int]) -> bool:
    """Whether it is a mask, as polygons of three points and more or as runs."""
    if isinstance(segmentation, dict):
        counts: Any = segmentation.get("counts")
        whole = isinstance(counts, str) or (numbers(counts, 1) and sum(counts) == size[0] * size[1])
        return list(segmentation.get("size", ())) == list(size) and whole
    return isinstance(segmentation, list) and bool(segmentation) and all(numbers(p, 6) for p in segmentation)


def found(folder: Path, split: str, file: Path, images: Sequence[dict[str, Any]]) -> list[Path]:
    """The files of the images, all of them there. Raises UserError."""
    places = [folder / name.format(split) for name in FOLDERS]
    place = next((p for p in places if (p / images[0]["file_name"]).is_file()), places[0])
    paths = [place / image["file_name"] for image in images]
    missing = [p for p in paths if not p.is_file()]
    if missing:
        raise UserError(f"{missing[0]}: no such image, and {len(missing)} of the {len(paths)} in {file} are missing")
    return paths
