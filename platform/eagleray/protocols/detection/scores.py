"""COCO's scores of boxes and masks, and its two ways to write a mask: polygons, and lengths of runs."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from faster_coco_eval import COCO, COCOeval_faster
from faster_coco_eval import mask as runs
from numpy.typing import NDArray

KINDS = {"bbox": "box", "segm": "mask"}
# Average precision over overlaps of 0.5 to 0.95, at one of them, and of objects below 32 x 32 and 96 x 96 pixels.
NAMES = {"AP_all": "ap", "AP_50": "ap50", "AP_75": "ap75"}
NAMES |= {"AP_small": "ap_small", "AP_medium": "ap_medium", "AP_large": "ap_large"}


def to_mask(segmentation: Any, height: int, width: int) -> NDArray[np.uint8]:
    """Polygons [[x, y, x, y, ...], ...] or runs {"size": [H, W], "counts": a list or COCO's text} to pixels (H, W), of
    0 and 1."""
    return runs.decode(_runs(segmentation, height, width))


def to_runs(mask: NDArray[np.uint8]) -> dict[str, Any]:
    """Pixels (H, W), 0 or 1, to runs."""
    return dict(runs.encode(np.asfortranarray(mask)))


def area(segmentation: Any, height: int, width: int) -> float:
    return float(runs.area(_runs(segmentation, height, width)))


def _runs(segmentation: Any, height: int, width: int) -> Any:
    if isinstance(segmentation, list):
        return runs.merge(runs.frPyObjects(segmentation, height, width))
    if isinstance(segmentation["counts"], list):
        return runs.frPyObjects(segmentation, height, width)
    return segmentation


def scores(truth: Mapping[str, Any], found: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Percent, by name. `truth` is what a COCO file holds, each annotation with `area` and `iscrowd`; what was found
    has image_id, category_id, score, bbox [x, y, width, height] and segmentation (runs). A size that no object has is
    left out."""
    out: dict[str, float] = {}
    for kind, name in KINDS.items():
        # A result's size, by which small and large ones are told apart, is its mask's unless it has a box.
        unwanted = "segmentation" if kind == "bbox" else "bbox"
        judge = COCO(dict(truth))
        given = [{k: v for k, v in f.items() if k != unwanted} for f in found]
        run = COCOeval_faster(judge, judge.loadRes(given), kind)
        run.run()
        stats = run.stats_as_dict
        out |= {f"detection/{name}_{NAMES[k]}": 100 * stats[k] for k in NAMES if stats[k] >= 0}
    return out
