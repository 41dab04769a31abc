"""Describes the metrics of a recipe's published results and of our own in words."""

from collections.abc import Mapping
from typing import Any

# Every metric that the recipe keys `published` and `ours` may have, and how it is printed.
METRICS: Mapping[str, str] = {
    "linear": "linear {} %",
    "knn": "kNN {} %",
    "top1": "top-1 {} %",
    "from_random": "from random weights {} %",
    "fine_tuned": "fine-tuned {} %",
    "average_of_18": "mean of 18 datasets {}",
    "box_ap": "COCO box AP {}",
    "mask_ap": "COCO mask AP {}",
    "miou": "ADE20K {} mIoU",
    "upernet_miou": "ADE20K with UPerNet {} mIoU",
    "davis": "DAVIS {} J&F",
    "correspondence": "correspondence {} %",
    "gain": "{:+}",
}


def numbers(entry: Mapping[str, Any]) -> str:
    """Return the metrics of one entry, such as `linear 78.1 %, kNN 75.7 %`."""
    return ", ".join(text.format(entry[metric]) for metric, text in METRICS.items() if metric in entry)
