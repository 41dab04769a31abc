"""Fine-tune a backbone for detection and instance segmentation, and measure COCO's average precision.

The detector is Mask R-CNN or Cascade Mask R-CNN. The settings are those of SelfPatch's supplement A (Yun et al. 2022,
arXiv:2206.07990) for 1x and of DRLoc's section 5.3 (Liu et al. 2021, arXiv:2106.03746) for 3x."""

import copy
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

from eagleray import config
from eagleray.base import dist
from eagleray.base.errors import UserError
from eagleray.dense.catalogue import Detection
from eagleray.dense.detection.c4 import freeze, mask_rcnn_c4
from eagleray.dense.detection.data import Coco
from eagleray.dense.detection.heads import mask_rcnn
from eagleray.dense.detection.pyramid import FeaturePyramid
from eagleray.dense.detection.scores import scores, to_runs
from eagleray.dense.detection.train import DetectionSchedule, fit, load_schedule
from eagleray.engine.precision import autocast
from eagleray.models.backbone import Backbone
from eagleray.protocols.digests import digest, tree_digest, weights_digest
from eagleray.protocols.fine_tuning import read_beforehand, set_drop_path
from eagleray.protocols.outcome import Outcome
from eagleray.protocols.protocol import Workspace
from eagleray.protocols.visual.draw import Tile, pixels, sheet
from eagleray.storage.ordered_map import ordered_map

CONFIDENT = 0.5  # lowest score of an object that is drawn, and lowest probability of a pixel in a mask
PICTURES = 4  # number of images in the picture
COLOURS = ("#d5402b", "#2f6fd0", "#e69a00", "#7a3fb0", "#2f8f4e", "#00a5b5", "#d6008f", "#7d5a28")


def detection(backbone: Backbone, coco: Path, protocol: Detection, workspace: Workspace) -> Outcome:
    """Fine-tune a copy of the backbone with a detector's heads, and measure average precision in percent.

    `coco` is a folder in COCO's layout; the detector is trained on its split `train` and tested on its split `val`. A
    call with the same arguments continues a stopped training from its checkpoint in the workspace. Several ranks share
    the work; rank 0 returns the outcome, and writes pictures and checkpoints. Raises UserError when the schedule or the
    data are wrong, or the backbone does not fit them."""
    settings = load_schedule(protocol.schedule)
    train, val = Coco.of(coco, "train"), Coco.of(coco, "val")
    if train.categories != val.categories:
        raise UserError(f"{val.file}: its categories differ from those of {train.file}")
    if not train.trainable():
        raise UserError(f"{train.file}: no object is at least a pixel wide and high inside its image")
    torch.manual_seed(settings.seed)
    backbone = copy.deepcopy(backbone).requires_grad_(True)  # a momentum teacher's parameters are frozen
    weights = weights_digest(backbone, workspace.backbone)
    net = build(backbone, len(train.categories), settings)
    tag = digest(weights, config.chosen(settings), tree_digest(coco, times=True))
    name = f"detection-{tag[:8]}"
    out, note = workspace.out, workspace.note
    note(f"detection: {len(train.trainable())} training images, {len(val)} validation images")
    read_beforehand(val.image, range(len(val)))
    fit(net, train, settings, f"{workspace.checkpoints}/{name}", out / name, note)
    results: list[tuple[int, list[Any]]] = []
    pictures: list[tuple[int, Any]] = []
    for i, result in predictions(net, val):
        results.append((i, list(coco_results(val, i, result))))
        pictures += [(i, result)] if i < PICTURES else []
    parts = dist.gather_at_zero((results, pictures))
    if parts is None:
        return Outcome({})
    by_image, drawn = (dict(sorted(row for part in column for row in part)) for column in zip(*parts, strict=True))
    numbers = scores(val.tree, [result for some in by_image.values() for result in some])
    details = (
        {"schedule": protocol.schedule}
        | config.flatten(config.to_plain(settings))
        | {"train": len(train), "val": len(val)}
    )
    return Outcome(numbers, details, (draw(val, list(drawn.items()), out / "detection.png"),))


def build(backbone: Backbone, classes: int, settings: DetectionSchedule) -> nn.Module:
    """Return a detector for this number of classes, on the backbone's device. The backbone becomes a part of it.

    Raises UserError when the backbone's maps do not fit a feature pyramid, or when a setting needs a ResNet."""
    set_drop_path(backbone.model, settings.drop_path)
    if settings.frozen:
        freeze(backbone)
    device = next(backbone.parameters()).device
    shared: dict[str, Any] = {
        "sizes": settings.sizes,
        "longest": settings.longest,
        "anchor": settings.anchor,
        "regions": settings.regions,
        "parts": settings.parts,
    }
    if settings.head == "c4":
        net = mask_rcnn_c4(backbone, classes + 1, frozen=settings.frozen, **shared)
    else:
        pyramid = FeaturePyramid(backbone, settings.channels)
        net = mask_rcnn(pyramid, classes + 1, cascade=settings.cascade, convolutions=settings.convolutions, **shared)
    return net.to(device)


@torch.inference_mode()
def predictions(net: nn.Module, data: Coco) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Yield, for each image of this rank's share, its index and its n predictions: boxes (n, 4), labels (n,), scores
    (n,) and masks (n, 1, H, W)."""
    net.eval()
    device = next(net.parameters()).device
    mine = range(dist.rank(), len(data), dist.size())
    for i, image in zip(mine, ordered_map(data.image, mine), strict=True):
        with autocast(device):
            [result] = net([image.to(device).float() / 255])
        result["masks"] = result["masks"] >= CONFIDENT
        yield i, {name: value.cpu() for name, value in result.items()}


def coco_results(data: Coco, i: int, result: dict[str, Tensor]) -> Iterator[dict[str, Any]]:
    """Yield the predictions for image i in COCO's format of results."""
    categories = list(data.categories)
    for box, label, score, mask in zip(*(result[k] for k in ("boxes", "labels", "scores", "masks")), strict=True):
        x0, y0, x1, y1 = box.tolist()
        yield {
            "image_id": data.tree["images"][i]["id"],
            "category_id": categories[int(label) - 1],
            "score": float(score),
            "bbox": [x0, y0, x1 - x0, y1 - y0],
            "segmentation": to_runs(mask[0].byte().numpy()),
        }


def draw(data: Coco, results: list[tuple[int, dict[str, Tensor]]], path: Path) -> Path:
    """Draw images with their annotations on the left and their predictions on the right, and return `path`.

    `results` are pairs from `predictions`. Only predictions with a score of at least CONFIDENT are drawn. The picture
    is written to `path`."""
    lines = {}
    for i, result in results:
        image, target = data[i]
        confident = result["scores"] >= CONFIDENT
        right = {k: result[k][confident] for k in ("boxes", "labels")} | {"masks": result["masks"][confident, 0]}
        lines[str(i + 1)] = [
            Tile(pixels(paint(image, target)), f"annotated: {counts(data, target)}"),
            Tile(pixels(paint(image, right)), f"predicted: {counts(data, right)}"),
        ]
    title = f"{data.file.parent.parent.name}: annotated objects, and those predicted with a score above {CONFIDENT:g}"
    return sheet(lines, path, title)


def counts(data: Coco, objects: dict[str, Tensor]) -> str:
    """Return the number of objects of the two most frequent classes as text."""
    each = Counter(list(data.categories.values())[int(y) - 1] for y in objects["labels"])
    return ", ".join(f"{n} {name}" for name, n in each.most_common(2)) + (", ..." if len(each) > 2 else "") or "nothing"


def paint(image: Tensor, objects: dict[str, Tensor]) -> Tensor:
    """Draw boxes and masks over an image (3, H, W), uint8, with a colour for each class."""
    if not len(objects["labels"]):
        return image
    colours: list[Any] = [COLOURS[(int(y) - 1) % len(COLOURS)] for y in objects["labels"]]
    image = draw_segmentation_masks(image, objects["masks"].bool(), alpha=0.5, colors=colours)
    return draw_bounding_boxes(image, objects["boxes"], colors=colours, width=2)
