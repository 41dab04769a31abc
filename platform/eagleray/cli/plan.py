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
    """A context without garbage collection, which takes up a tenth of the time of importing PyTorch."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def plan(
    name: RecipeName,
    overrides: Overrides = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="Kind of GPU, such as h100, a100-80, l4 or t4. By default the device of this machine."),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(help="Number of workers with one GPU each, the same as workers=N.", min=1)
    ] = None,
    price: Annotated[float | None, typer.Option(help="Price of one GPU per hour, in any currency.", min=0)] = None,
    images: Annotated[
        int | None,
        typer.Option(help="Number of training images, which are then not read. By default that of data.train.", min=1),
    ] = None,
    cpus: Annotated[
        int | None,
        typer.Option(help="Number of CPU cores per GPU for the loader processes, which decode and crop.", min=1),
    ] = None,
    input_rate: Annotated[
        float | None,
        typer.Option(
            help="Images per second that one loader process decodes and crops. By default measured on this machine.",
            min=0.1,
        ),
    ] = None,
    store_rate: Annotated[
        float | None,
        typer.Option(help="Megabytes per second that the object store delivers to the whole run.", min=0.1),
    ] = None,
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """Forecast whether a run fits into memory, how fast it will be, what limits its speed and what it costs.

    Eagleray traces one step of the recipe without computing it, which takes seconds on any machine."""
    from eagleray.cli.early import check_plan

    with silence(as_json), garbage_kept():
        check_plan(name, overrides or (), plugin or (), gpu=gpu, images=images)
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
