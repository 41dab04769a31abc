"""The command that lists what a recipe or another command can name: list."""

import json
from enum import StrEnum
from typing import Annotated

import typer

from eagleray.base.console import out
from eagleray.cli.options import Json


def register(app: typer.Typer) -> None:
    app.command("list")(list_)


class Kind(StrEnum):
    methods = "methods"
    backbones = "backbones"
    recipes = "recipes"
    sweeps = "sweeps"
    datasets = "datasets"
    protocols = "protocols"


def list_(
    kind: Annotated[Kind, typer.Argument(help="What to list.")],
    as_json: Json = False,
) -> None:
    """List methods, tested backbones, recipes, sweeps, datasets or evaluation protocols, with a line about each."""
    rows = catalogue(kind.value)
    if as_json:
        print(json.dumps(rows))
    else:
        for name, text in rows.items():
            out.print(f"{name:<36} {text}", markup=False)


def catalogue(kind: str) -> dict[str, str]:
    """The names of a kind, and one line about each. Only modules that load no PyTorch are imported."""
    if kind == "backbones":
        from eagleray.models.network import TESTED

        return dict.fromkeys(TESTED, "tested; any other timm model can be named too")
    if kind == "methods":
        from eagleray.config import parts, signature

        return {name: signature.headline(f"eagleray.methods.{name}") for name in parts("eagleray.methods")}
    if kind == "datasets":
        from eagleray.datasets.catalogue import DATASETS

        return {name: str(dataset) for name, dataset in DATASETS.items()}
    if kind == "protocols":
        from eagleray.protocols.registry import PROTOCOLS

        return {name: str(protocol) for name, protocol in PROTOCOLS.items()}
    from eagleray.config import bundled

    if kind == "sweeps":
        return {n: bundled.header(bundled.find_sweep(n))[0] for n in bundled.names("sweep")}
    return {name: recipe.about for name, recipe in bundled.recipes().items()}
