"""Define the command plan, which forecasts a run."""

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

import eagleray
from eagleray.base.console import out, silence
from eagleray.cli.options import Json, Overrides, Plugins, RecipeName


@contextmanager
def garbage_kept() -> Iterator[None]:
    """A context without garbage collection, which takes a tenth of the time that PyTorch takes to import."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def register(app: typer.Typer) -> None:
    app.command()(plan)


def plan(
    name: RecipeName,
    overrides: Overrides = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="Kind of GPU, such as h100, a100-80, l4 or t4. By default the device of this machine."),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(help="Number of workers, one GPU each. Short for workers=N.", min=1)
    ] = None,
    price: Annotated[float | None, typer.Option(help="Price of a GPU for an hour, in any currency.", min=0)] = None,
    images: Annotated[
        int | None, typer.Option(help="Number of training images, if neither data.train nor the name tells it.", min=1)
    ] = None,
    cpus: Annotated[
        int | None, typer.Option(help="CPU cores of each GPU, on which loader processes decode and crop.", min=1)
    ] = None,
    input_rate: Annotated[
        float | None,
        typer.Option(
            help="Images per second that one loader process decodes and crops. By default measured here.", min=0.1
        ),
    ] = None,
    store_rate: Annotated[
        float | None, typer.Option(help="Megabytes per second that the store delivers to the whole run.", min=0.1)
    ] = None,
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """Forecast whether a run fits into memory, how fast it will be, what limits its speed and what it costs.

    Nothing is trained: Eagleray traces a step of the recipe without computing it, in seconds on any machine."""
    from eagleray.cli.early import check_plan

    with silence(as_json), garbage_kept():
        check_plan(name, overrides or (), plugin or (), gpu)
        forecast = eagleray.plan(
            name,
            overrides,
            gpu=gpu,
            gpus=gpus,
            price=price,
            images=images,
            cpus=cpus,
            input_rate=input_rate,
            store_rate=store_rate,
            plugins=plugin or (),
        )
    if as_json:
        print(json.dumps(forecast.json()))
    else:
        out.print(str(forecast), markup=False, highlight=False, soft_wrap=True)
