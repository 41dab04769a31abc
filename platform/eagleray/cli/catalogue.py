"""Define the command `list`, which prints the names that recipes and other commands accept."""

import json
from enum import StrEnum
from typing import Annotated, Literal

import typer

from eagleray.base.console import out
from eagleray.base.errors import UserError
from eagleray.cli.options import Json, Plugins


class Kind(StrEnum):
    methods = "methods"
    backbones = "backbones"
    recipes = "recipes"
    sweeps = "sweeps"
    datasets = "datasets"
    protocols = "protocols"


def list_(
    kind: Annotated[Kind, typer.Argument(help="What to list.")],
    words: Annotated[
        list[str] | None, typer.Argument(help="List only entries with all of these words.", metavar="[WORD]...")
    ] = None,
    method: Annotated[str, typer.Option(help="List only recipes of this method, such as esvit.")] = "",
    backbone: Annotated[
        str, typer.Option(help="List only recipes whose backbone's name contains this text, such as swin.")
    ] = "",
    data: Annotated[str, typer.Option(help="List only recipes for this data set, such as in1k.")] = "",
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """List methods, tested backbones, recipes, sweeps, datasets or evaluation protocols, with a line about each."""
    from eagleray.config import plugins

    if kind is Kind.recipes:
        from eagleray.cli import recipes

        if plugin:
            plugins.use(plugin)
        recipes.show(words or [], method=method, backbone=backbone, data=data, as_json=as_json)
        return
    if method or backbone or data:
        raise UserError(f"--method, --backbone and --data choose among recipes, got `list {kind.value}`")
    plugins.use(plugin or ())
    rows = {
        name: text
        for name, text in catalogue(kind.value).items()
        if all(word.lower() in f"{name} {text}".lower() for word in words or [])
    }
    if as_json:
        print(json.dumps(rows))
    else:
        for name, text in rows.items():
            out.print(f"{name:<36} {text}", markup=False)


def catalogue(kind: str) -> dict[str, str]:
    """Return the names of one kind, each with a line about it. Only modules that do not load PyTorch are imported."""
    if kind == "backbones":
        from eagleray.models.network import TESTED

        return dict.fromkeys(TESTED, "tested; any other timm model can be named too")
    if kind == "methods":
        from eagleray.config import parts, signature

        own = {name: signature.headline(f"eagleray.methods.{name}") for name in parts("eagleray.methods")}
        return own | of_plugins("method")
    if kind == "datasets":
        from eagleray.datasets.catalogue import DATASETS

        return {name: str(dataset) for name, dataset in DATASETS.items()} | of_plugins("source")
    if kind == "protocols":
        from eagleray.evaluation.registry import PROTOCOLS

        return {name: str(protocol) for name, protocol in PROTOCOLS.items()}
    from eagleray.config import bundled

    if kind == "sweeps":
        return {n: bundled.header(bundled.find_sweep(n))[0] for n in bundled.names("sweep")}
    return {name: recipe.about for name, recipe in bundled.recipes().items()}


def of_plugins(kind: Literal["method", "source"]) -> dict[str, str]:
    """Return the names of one kind that plug-ins have registered, each with the first line of its docstring."""
    from eagleray.config import register

    return {
        name: ((entry.target.__doc__ or "").strip().splitlines() or [f"of the plug-in {entry.module}"])[0]
        for name, entry in register.entries(kind).items()
    }
