"""Train from pretrained weights: finetune."""

import json
from typing import Annotated

import typer

from eagleray.base.console import silence
from eagleray.cli.options import Json, Overrides, RecipeName


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
    as_json: Json = False,
) -> None:
    """Train a recipe from pretrained weights. The same as `pretrain` with backbone.weights=WEIGHTS."""
    from eagleray.cli import commands

    with silence(as_json):
        summary = commands.pretrain(name, [*(overrides or []), f"backbone.weights={json.dumps(weights)}"])
    if as_json:
        print(json.dumps(summary))
