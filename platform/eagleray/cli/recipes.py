"""List the shipped recipes that match some words, as a table or as JSON, for `eagleray list recipes`."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from eagleray.base.console import out
from eagleray.base.errors import UserError
from eagleray.config import bundled
from eagleray.config.published import numbers

# Recipes to begin with for a folder of images, and what each is good for.
FIRST: Mapping[str, str] = {
    "dino_vits16_in1k_ep100": "DINO on ViT-S/16: features for kNN and retrieval; the default of `eagleray init`",
    "mocov3_vits16_in1k_ep300": "MoCo v3 on ViT-S/16: two crops, so half the memory of DINO",
    "esvit_swint_in1k_ep300": "EsViT on Swin-T: features for detection and segmentation",
    "moco_resnet50_in1k_ep200": "MoCo v2 on ResNet-50: small batches on one GPU",
    "simclr_vitxs8_cifar10_ep2": "SimCLR on a tiny ViT: images of 32 pixels, minutes on a CPU",
}


def facts(name: str) -> dict[str, Any]:
    """Return the fields that the list shows of a recipe."""
    said, tree = bundled.recipe(name), bundled.tree(name)
    method = tree["method"] if isinstance(tree["method"], str) else tree["method"]["name"]
    short, data = name.removeprefix(f"{method}_").split("_")[:2]
    return {
        "name": name,
        "method": method,
        "backbone": short,
        "model": tree["backbone"]["name"],
        "data": data,
        "epochs": tree["optim"]["epochs"],
        "published": [dict(entry) for entry in said.published],
        "about": said.about,
    }


def matching(words: Sequence[str], *, method: str = "", backbone: str = "", data: str = "") -> list[dict[str, Any]]:
    """Return the facts of the recipes that match all filters: `method` is the method's name, `backbone` part of the
    backbone's or model's name, `data` part of the data's name or the description, and each word part of the recipe's
    name, the model's name or the description. Raises UserError when none match."""
    every = [facts(name) for name in bundled.names()]
    methods = sorted({one["method"] for one in every})
    if method and method not in methods:
        raise UserError(f"--method {method}: no recipe has this method; known are {', '.join(methods)}")
    fitting = [
        one
        for one in every
        if method in ("", one["method"])
        and backbone.lower() in f"{one['backbone']} {one['model']}".lower()
        and data.lower() in f"{one['data']} {one['about']}".lower()
        and all(word.lower() in f"{one['name']} {one['model']} {one['about']}".lower() for word in words)
    ]
    if not fitting:
        raise UserError("no recipe matches all of these; `eagleray list recipes` lists all recipes")
    return fitting


def show(words: Sequence[str], *, method: str = "", backbone: str = "", data: str = "", as_json: bool = False) -> None:
    """Print the recipes that match. Raises UserError when there are none."""
    rows = matching(words, method=method, backbone=backbone, data=data)
    if as_json:
        print(json.dumps(rows))
        return
    if len(rows) == len(bundled.names()):
        out.print(
            "For images of your own, `eagleray init --images N` writes a recipe that fits. Begin with one of these:"
        )
        out.print(two_columns(FIRST), "\nAll recipes:", sep="\n")
    if out.is_terminal:
        out.print(table(rows))
    else:  # one line per recipe, for grep
        for row in rows:
            print(f"{row['name']:<48} {best(row):<28} {row['about']}")
    out.print(f"{len(rows)} recipes; `eagleray show NAME` prints one with every default", markup=False)


def two_columns(rows: Mapping[str, str]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column()
    for name, text in rows.items():
        grid.add_row(f"  {name}", text)
    return grid


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the rows as a table that fits the terminal: descriptions may be cut, names are not."""
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    grid.add_column("Recipe", no_wrap=True, min_width=max(len(row["name"]) for row in rows))
    if any(map(best, rows)):
        grid.add_column("Published", no_wrap=True, overflow="ellipsis")
    grid.add_column("About", no_wrap=True, overflow="ellipsis", ratio=1)
    for row in rows:
        grid.add_row(row["name"], *([best(row)] if any(map(best, rows)) else []), row["about"])
    return grid


def best(row: Mapping[str, Any]) -> str:
    """Return the first published score of a recipe as text; empty when there is none."""
    return next((numbers(entry) for entry in row["published"] if "gain" not in entry and numbers(entry)), "")
