"""Define the command tune, which runs a sweep."""

import json
import sys
from typing import Annotated

import typer

import eagleray
from eagleray.base.console import silence
from eagleray.cli.options import Json, Plugins, complete_sweep, one_place


def tune(
    name: Annotated[
        str,
        typer.Argument(
            help="Sweep: a name shown by `eagleray list sweeps`, or the path of a YAML file.",
            metavar="SWEEP",
            autocompletion=complete_sweep,
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Recipe keys for all trials, out=FOLDER or out=s3://BUCKET/FOLDER, or keys of the sweep itself such "
            "as sweep.trials=20.",
            metavar="[KEY=VALUE]...",
            callback=one_place,
        ),
    ] = None,
    plugin: Plugins = None,
    most: Annotated[
        int | None,
        typer.Option(
            "--max-concurrent",
            help="Maximum number of parallel trials. By default as many as fit on the cluster.",
            min=1,
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted sweep.")] = False,
    as_json: Json = False,
) -> None:
    """Search for the best settings of a recipe with many trials, and write a table, plots and the best recipe.

    Most sweeps set data.train=SHARDS, data.test=SHARDS and out=FOLDER."""
    with silence(as_json):
        result = eagleray.tune(name, overrides, plugins=plugin or (), max_concurrent=most, resume=resume)
    if not result.pop("finished"):
        sys.exit(1)
    if as_json:
        print(json.dumps(result))
    if result["best"] is None:  # no trial took all its steps
        sys.exit(1)
