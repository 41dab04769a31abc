"""Define the command plan, which forecasts a run."""

import json
from typing import Annotated

import typer

import eagleray
from eagleray.base.console import out, silence
from eagleray.cli.options import Json, Overrides, Plugins, RecipeName


def register(app: typer.Typer) -> None:
    app.command()(plan)


def plan(
    name: RecipeName,
    overrides: Overrides = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="Kind of GPU, such as h100; docs/plan.md lists all. By default the device of this machine."),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(help="Number of workers, one GPU each. Short for workers=N.", min=1)
    ] = None,
    price: Annotated[float | None, typer.Option(help="Price of a GPU for an hour, in any currency.", min=0)] = None,
    images: Annotated[
        int | None, typer.Option(help="Number of training images, where neither data.train nor the name tells.", min=1)
    ] = None,
    input_rate: Annotated[
        float | None,
        typer.Option(
            help="Images per second that one loader process decodes and crops. By default it is measured here.", min=0.1
        ),
    ] = None,
    store_rate: Annotated[
        float | None, typer.Option(help="Megabytes per second that the store gives to the whole run.", min=0.1)
    ] = None,
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """Say before a run starts whether it fits into memory, how fast it will be, what limits it and what it costs.

    Nothing is trained: a step of the recipe is traced without computing it, on any machine, in seconds."""
    with silence(as_json):
        planned = eagleray.plan(
            name,
            overrides,
            gpu=gpu,
            gpus=gpus,
            price=price,
            images=images,
            input_rate=input_rate,
            store_rate=store_rate,
            plugins=plugin or (),
        )
    if as_json:
        print(json.dumps(planned.json()))
    else:
        out.print(str(planned), markup=False, highlight=False, soft_wrap=True)
