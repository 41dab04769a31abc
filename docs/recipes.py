#!/usr/bin/env python
"""Rewrites the tables of docs/recipes.md from the recipes of pipelines/."""

import itertools
from pathlib import Path

from eagleray.config import bundled
from eagleray.config.published import cost_words, ours_words, published_words
from eagleray.datasets.catalogue import DATASETS
from eagleray.runs import recipe

PAGE = Path(__file__).with_name("recipes.md")
MARK = "<!-- from here on written by docs/recipes.py -->\n"
COLUMNS = ("Recipe", "Backbone", "Data", "Epochs", "Batch", "Published", "Cost", "Ours")
DATA = {
    "coco": "COCO",
    "in22k": "ImageNet-22k",
    "openimages": "OpenImages-v4",
    "webvision": "WebVision-v1",
    "shapes": "drawn shapes",
} | {dataset.short: dataset.title for dataset in DATASETS.values()}


def page(written: str) -> str:
    """Return what people wrote of the page, then a table for each method."""
    out = written.partition(MARK)[0] + MARK
    for method, names in itertools.groupby(bundled.names(), key=lambda name: recipe.load(name).method.name):
        out += f"\n### `{method}`\n\n" + row(*COLUMNS) + row(*["---"] * len(COLUMNS))
        out += "".join(row(*cells(name)) for name in names)
    return out


def row(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |\n"


def cells(name: str) -> list[object]:
    r, data = recipe.load(name), next(title for short, title in DATA.items() if f"_{short}_" in name)
    said = bundled.recipe(name)
    numbers = [published_words(said.published), cost_words(said.cost), ours_words(said.ours)]
    return [f"`{name}`", f"`{r.backbone.name}`", data, r.optim.epochs, r.optim.batch, *numbers]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
