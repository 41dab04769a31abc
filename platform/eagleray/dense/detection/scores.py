"""Compute COCO's average precision of boxes and masks, and convert between its formats of masks.

A mask is stored as polygons or as runs: the lengths of alternating series of pixels outside and inside the object."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from faster_coco_eval import COCO, COCOeval_faster
from faster_coco_eval import mask as runs
from numpy.typing import NDArray

KINDS = {"bbox": "box", "segm": "mask"}
# Maps faster_coco_eval's names of average precisions to ours. `ap` is the mean over IoU thresholds from 0.5 to 0.95.
# Small objects have fewer than 32 x 32 pixels, and large ones more than 96 x 96.
NAMES = {"AP_all": "ap", "AP_50": "ap50", "AP_75": "ap75"}
NAMES |= {"AP_small": "ap_small", "AP_medium": "ap_medium", "AP_large": "ap_large"}


def to_mask(segmentation: Any, height: int, width: int) -> NDArray[np.uint8]:
    """Convert polygons or runs to a mask (H, W) of 0 and 1.

    Polygons are [[x, y, x, y, ...], ...]. Runs are {"size": [H, W], "counts": a list, or COCO's compressed text}."""
    return runs.decode(_runs(segmentation, height, width))


def to_runs(mask: NDArray[np.uint8]) -> dict[str, Any]:
    """Convert a mask (H, W) of 0 and 1 to runs."""
    return dict(runs.encode(np.asfortranarray(mask)))


def area(segmentation: Any, height: int, width: int) -> float:
    """Return the area of a mask in pixels."""
    return float(runs.area(_runs(segmentation, height, width)))


def _runs(segmentation: Any, height: int, width: int) -> Any:
    if isinstance(segmentation, list):
        return runs.merge(runs.frPyObjects(segmentation, height, width))
    if isinstance(segmentation["counts"], list):
        return runs.frPyObjects(segmentation, height, width)
    return segmentation


def scores(truth: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return COCO's average precisions in percent by name.

    `truth` is the content of a COCO file in which each annotation has `area` and `iscrowd`. Each result has image_id,
    category_id, score, bbox [x, y, width, height] and segmentation (runs). If no object is small, medium or large, the
    average precision for this size is left out."""
    out: dict[str, float] = {}
    for kind, name in KINDS.items():
        # COCO's code takes the area of a result from its box if it has one, so results for masks must have none.
        unwanted = "segmentation" if kind == "bbox" else "bbox"
        annotations = COCO(dict(truth))
        predictions = [{k: v for k, v in r.items() if k != unwanted} for r in results]
        run = COCOeval_faster(annotations, annotations.loadRes(predictions), kind)
        run.run()
        stats = run.stats_as_dict
        out |= {f"detection/{name}_{NAMES[k]}": 100 * stats[k] for k in NAMES if stats[k] >= 0}
    return out
