"""Describes a recipe's published results, our own results and its training cost in words."""

from collections.abc import Mapping, Sequence
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
# The other keys of an entry of `published`: source, data and epochs if they differ from the recipe's, and a note.
DETAILS = ("source", "data", "epochs", "note")


def numbers(entry: Mapping[str, Any]) -> str:
    """Return the metrics of one entry, such as `linear 78.1 %, kNN 75.7 %`."""
    return ", ".join(text.format(entry[metric]) for metric, text in METRICS.items() if metric in entry)


def published_words(published: Sequence[Mapping[str, Any]]) -> str:
    """Return the published results, each with its source, or `none`."""
    return "; ".join(map(_entry, published)) or "none"


def _entry(entry: Mapping[str, Any]) -> str:
    words = numbers(entry)
    words += f" on {entry['data']}" if "data" in entry else ""
    words += f" with optim.epochs={entry['epochs']}" if "epochs" in entry else ""
    words += (" " if "gain" in entry else ", " if words else "") + entry["note"] if "note" in entry else ""
    return f"{words} ({entry['source']})"


def cost_words(cost: Mapping[str, Any]) -> str:
    """Return the training cost that a recipe's authors state, as text, or `not published`."""
    if not cost:
        return "not published"
    devices = next((f"{cost[kind]} {kind[:3].upper()}s" for kind in ("gpus", "tpus") if kind in cost), "")
    devices += f" {cost['kind']}" if "kind" in cost else ""
    words = f"{cost['hours']} hours on {devices}" if "hours" in cost else devices
    words = ", ".join(filter(None, (words, cost.get("note"))))
    return f"{words} ({cost['source']})" if "source" in cost else words


def ours_words(ours: Mapping[str, Any]) -> str:
    """Return our own results and those of the untrained backbone as text, or `not run`."""
    if not ours:
        return "not run"
    words = numbers(ours)
    words += f" +- {ours['deviation']}" if "deviation" in ours else ""
    words += f" (untrained: {numbers(ours['untrained'])})" if "untrained" in ours else ""
    return ", ".join(filter(None, (words, ours.get("note"))))
