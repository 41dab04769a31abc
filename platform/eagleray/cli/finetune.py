"""Define the command finetune, which trains from pretrained weights."""

from typing import Annotated

import typer

import eagleray
from eagleray.base.console import silence
from eagleray.cli.options import Json, Overrides, Plugins, RecipeName
from eagleray.cli.outcome import show_run


def register(app: typer.Typer) -> None:
    app.command()(finetune)


def finetune(
    weights: Annotated[
        str,
        typer.Argument(
            help="Weights to start from: a run, a checkpoint, a file of tensors, or timm:NAME of a timm model."
        ),
    ],
    name: RecipeName,
    overrides: Overrides = None,
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """Train a recipe from pretrained weights. The same as `pretrain` with backbone.weights=WEIGHTS."""
    with silence(as_json):
        run = eagleray.finetune(weights, name, overrides, plugins=plugin or ())
    show_run(run, as_json)
