"""Detection and instance segmentation: a backbone learns as part of Mask R-CNN or Cascade Mask R-CNN, and COCO's
average precision judges it. Settings: SelfPatch's supplement A (Yun et al. 2022, arXiv:2206.07990) for 1x, section 5.3
of DRLoc (Liu et al. 2021, arXiv:2106.03746) for 3x."""

import copy
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

from eagleray import config
from eagleray.base.errors import UserError
from eagleray.data.index import Note
from eagleray.models.backbone import Backbone
from eagleray.protocols.detection.data import Coco, read
from eagleray.protocols.detection.heads import mask_rcnn
from eagleray.protocols.detection.pyramid import FeaturePyramid
from eagleray.protocols.detection.scores import scores, to_runs
from eagleray.protocols.detection.train import Schedules, fit, named
from eagleray.protocols.digests import digest, tree_digest, weights_digest
from eagleray.protocols.drop_path import set_drop_path
from eagleray.protocols.outcome import Outcome
from eagleray.protocols.visual.draw import Tile, pixels, sheet
from eagleray.storage.ordered_map import ahead

SURE = 0.5  # the score from which on what was found is drawn, and the share from which on a pixel is a mask's
DRAWN = 4  # images in the picture
PAINT = ("#d5402b", "#2f6fd0", "#e69a00", "#7a3fb0", "#2f8f4e", "#00a5b5", "#d6008f", "#7d5a28")


def detection(backbone: Backbone, coco: Path, out: Path, note: Note, *, schedule: str = "1x") -> Outcome:
    """Train a copy of the backbone with a detector's heads on `train` of a folder in COCO's layout and score it on
    `val`, in percent. `schedule` is 1x, 3x, either with _cascade, or a file of such settings. The same call continues a
    training that was stopped. Raises UserError."""
    how = named(schedule)
    learnt, judged = Coco.of(coco, "train"), Coco.of(coco, "val")
    if learnt.categories != judged.categories:
        raise UserError(f"{judged.file}: its categories are not those of {learnt.file}")
    if not learnt.learnable():
        raise UserError(f"{learnt.file}: no object there is a pixel wide and high inside its image")
    torch.manual_seed(how.seed)
    net = build(copy.deepcopy(backbone), len(learnt.categories), how)
    name = digest(weights_digest(backbone), config.plain(how), tree_digest(coco, times=True))
    folder = out / f"detection-{name[:8]}"
    folder.mkdir(parents=True, exist_ok=True)
    note(f"detection: learns from {len(learnt.learnable())} images, is judged on {len(judged)}")
    fit(net, learnt, how, folder, note)
    found: list[Any] = []
    shown: list[Any] = []
    for place, result in predictions(net, judged):
        found += rows(judged, place, result)
        shown += [(place, result)] if place < DRAWN else []
    settings = {"schedule": schedule} | config.flat(config.plain(how)) | {"train": len(learnt), "val": len(judged)}
    return Outcome(scores(judged.tree, found), settings, (draw(judged, shown, out / "detection.png"),))


def build(backbone: Backbone, classes: int, how: Schedules) -> nn.Module:
    """The detector of so many classes, on the backbone's device. Raises UserError."""
    if how.drop_path:
        set_drop_path(backbone.model, how.drop_path)
    device = next(backbone.parameters()).device
    net = mask_rcnn(
        FeaturePyramid(backbone, how.channels),
        classes + 1,
        cascade=how.cascade,
        sizes=how.sizes,
        longest=how.longest,
        anchor=how.anchor,
        regions=how.regions,
    )
    return net.to(device)


@torch.inference_mode()
def predictions(net: nn.Module, data: Coco) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """The place of each image, and boxes (n, 4), labels (n,), scores (n,) and masks (n, 1, H, W) found there."""
    net.eval()
    device = next(net.parameters()).device
    for place, image in enumerate(ahead(read, data.paths)):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            [found] = net([image.to(device).float() / 255])
        found["masks"] = found["masks"] >= SURE
        yield place, {name: value.cpu() for name, value in found.items()}


def rows(data: Coco, place: int, found: dict[str, Tensor]) -> Iterator[dict[str, Any]]:
    """What was found in an image as COCO writes it."""
    categories = list(data.categories)
    for box, label, score, mask in zip(*(found[k] for k in ("boxes", "labels", "scores", "masks")), strict=True):
        x0, y0, x1, y1 = box.tolist()
        yield {
            "image_id": data.tree["images"][place]["id"],
            "category_id": categories[int(label) - 1],
            "score": float(score),
            "bbox": [x0, y0, x1 - x0, y1 - y0],
            "segmentation": to_runs(mask[0].byte().numpy()),
        }


def draw(data: Coco, found: list[tuple[int, dict[str, Tensor]]], path: Path) -> Path:
    """Images with what is there on the left, and what was found on the right."""
    lines = {}
    for place, result in found:
        image, target = data[place]
        sure = result["scores"] >= SURE
        right = {k: result[k][sure] for k in ("boxes", "labels")} | {"masks": result["masks"][sure, 0]}
        lines[str(place + 1)] = [
            Tile(pixels(painted(image, target)), f"annotated: {counts(data, target)}"),
            Tile(pixels(painted(image, right)), f"found: {counts(data, right)}"),
        ]
    return sheet(lines, path, f"{data.file.parent.parent.name}: objects, and those found with a score above {SURE:g}")


def counts(data: Coco, objects: dict[str, Tensor]) -> str:
    """How many objects of each class, in words."""
    each = Counter(list(data.categories.values())[int(y) - 1] for y in objects["labels"])
    return ", ".join(f"{n} {name}" for name, n in each.most_common(2)) + (", ..." if len(each) > 2 else "") or "nothing"


def painted(image: Tensor, objects: dict[str, Tensor]) -> Tensor:
    """uint8 (3, H, W) with boxes and masks, each class in its colour."""
    if not len(objects["labels"]):
        return image
    colours: list[Any] = [PAINT[(int(y) - 1) % len(PAINT)] for y in objects["labels"]]
    image = draw_segmentation_masks(image, objects["masks"].bool(), alpha=0.5, colors=colours)
    return draw_bounding_boxes(image, objects["boxes"], colors=colours, width=2)
