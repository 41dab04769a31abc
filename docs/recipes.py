#!/usr/bin/env python
"""Writes docs/recipes/, a page of tables for each family of methods, from the recipes of pipelines/."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagleray.config import bundled
from eagleray.config.published import numbers
from eagleray.datasets.catalogue import DATASETS
from eagleray.runs import recipe

PAGES = Path(__file__).with_name("recipes")
WRITTEN = "<!-- written by docs/recipes.py -->\n"
# The title of each page and its methods: no page has more than a hundred recipes, so that a phone can open it.
FAMILIES = {
    "contrastive": ("MoCo, SimCLR and their kin", "moco mocov3 moby simclr instdisc pirl"),
    "joint": ("BYOL, SwAV and others without negatives", "byol byol_regions simsiam swav barlow_twins vicreg lejepa"),
    "dino": ("DINO, iBOT, DINOv2, DINOv3 and EsViT", "dino dinov2 dinov3 ibot esvit distill"),
    "patches": ("Patches, regions and masks", "selfpatch selfpatch_moby densecl detco pixpro instloc mae mpp"),
    "drloc": ("DRLoc", "drloc"),
    "supervised": ("Training and fine-tuning with labels", "supervised"),
}
COLUMNS = ("Recipe", "Backbone", "Data", "Epochs", "Batch", "Published", "Cost", "Ours")
DATA = {
    "coco": "COCO",
    "in22k": "ImageNet-22k",
    "imagenette": "Imagenette",
    "openimages": "OpenImages-v4",
    "webvision": "WebVision-v1",
    "shapes": "drawn shapes",
} | {dataset.short: dataset.title for dataset in DATASETS.values()}


def pages() -> dict[str, str]:
    """Return the text of every page by its name, with a table for each method."""
    tables = {}
    by_method = {name: recipe.load(name).method.name for name in bundled.names()}
    for method, names in itertools.groupby(sorted(by_method, key=by_method.__getitem__), key=by_method.__getitem__):
        rows = "".join(row(*cells(name)) for name in names)
        tables[method] = f"\n## {method}\n\n" + row(*COLUMNS) + row(*["---"] * len(COLUMNS)) + rows
    about = "\n[Recipes](../recipes.md#all-recipes) explains the columns of these tables.\n"
    return {
        name: f"# {title}\n\n{WRITTEN}{about}" + "".join(tables.pop(method) for method in methods.split())
        for name, (title, methods) in FAMILIES.items()
    }


def row(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |\n"


def cells(name: str) -> list[object]:
    r, data = recipe.load(name), next((title for short, title in DATA.items() if f"_{short}_" in name), "your images")
    said = bundled.recipe(name)
    results = [published_words(said.published), cost_words(said.cost), ours_words(said.ours)]
    return [f"`{name}`", f"`{r.backbone.name}`", data, r.optim.epochs, r.optim.batch, *results]


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


if __name__ == "__main__":
    PAGES.mkdir(exist_ok=True)
    for name, text in pages().items():
        (PAGES / f"{name}.md").write_text(text)
