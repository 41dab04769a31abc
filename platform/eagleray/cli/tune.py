"""The command for sweeps: tune."""

import json
from typing import Annotated

import typer

from eagleray.base.console import silence
from eagleray.cli.options import Json


def register(app: typer.Typer) -> None:
    app.command()(tune)


def tune(
    name: Annotated[str, typer.Argument(help="a name of `eagleray list sweeps`, or a YAML file", metavar="SWEEP")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="recipe keys for all trials, out=DIR, or sweep.KEY=VALUE", metavar="[KEY=VALUE]..."),
    ] = None,
    most: Annotated[
        int | None, typer.Option("--max-concurrent", help="trials at once; as many as fit by default", min=1)
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue a sweep that was ended")] = False,
    as_json: Json = False,
) -> None:
    """Search the best settings: data.train=URL data.test=URL out=DIR sweep.trials=N ..."""
    from eagleray.sweeps import run

    with silence(as_json):
        told = run.tune(name, overrides or [], most=most, resume=resume)
    if as_json:
        print(json.dumps(told))
