"""Define the command finetune, which trains from pretrained weights."""

from typing import Annotated

import typer

import eagleray
from eagleray.api.overrides import overrides_of
from eagleray.base.console import silence
from eagleray.cli.options import Json, MaxHours, Overrides, Plugins, RecipeName
from eagleray.cli.outcome import show_run


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
    max_hours: MaxHours = None,
    as_json: Json = False,
) -> None:
    """Train a recipe from pretrained weights, like `pretrain` with backbone.weights=WEIGHTS."""
    from eagleray.cli.early import check_run
    from eagleray.runs.named_run import one_look

    with silence(as_json), one_look():
        check_run(name, [*(overrides or ()), *overrides_of({"backbone.weights": weights})], plugin or ())
        run = eagleray.finetune(weights, name, overrides, plugins=plugin or (), max_hours=max_hours)
    show_run(run, as_json)
