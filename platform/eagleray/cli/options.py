"""Define the arguments and options that several commands share."""

from itertools import groupby
from typing import Annotated

import typer

from eagleray.base.errors import UserError


def one_place(words: list[str] | None) -> list[str] | None:
    """Return the words. Raises UserError if neighbours set one key of `data`, as shells expand a pattern in braces."""
    for key, same in groupby(words or (), key=lambda word: word.partition("=")[0] if "=" in word else ""):
        if key.startswith("data.") and (number := len(list(same))) > 1:
            raise UserError(f"{key}: given {number} times; expected one value, in quotes if it has braces: {key}='...'")
    return words


def complete_recipe(incomplete: str) -> list[str]:
    """Return the shipped recipes whose names begin with `incomplete`, for the shell's completion."""
    from eagleray.config import bundled

    return [name for name in bundled.names() if name.startswith(incomplete)]


def complete_sweep(incomplete: str) -> list[str]:
    """Return the shipped sweeps whose names begin with `incomplete`, for the shell's completion."""
    from eagleray.config import bundled

    return [name for name in bundled.names("sweep") if name.startswith(incomplete)]


RecipeName = Annotated[
    str,
    typer.Argument(
        help="Recipe: a name shown by `eagleray list recipes`, the path of a YAML file, or the folder or URL of a run.",
        metavar="RECIPE",
        autocompletion=complete_recipe,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Recipe keys to change, such as optim.batch=256. `eagleray show RECIPE` prints all keys.",
        metavar="[KEY=VALUE]...",
        callback=one_place,
    ),
]
Plugins = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin",
        help="Plug-in to load: a Python file or a module, which can add methods, views and more. May be repeated.",
        metavar="FILE_OR_MODULE",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Insist = Annotated[
    bool, typer.Option("--insist", help="Start the run even if its plan says that it does not fit into memory.")
]
MaxHours = Annotated[
    float | None,
    typer.Option(
        help="Hours after which the run saves a checkpoint and stops with exit status 124. Time spent waiting "
        "for machines counts.",
        min=0,
    ),
]
Profile = Annotated[
    str | None,
    typer.Option(
        help="Steps to profile, such as 10..12. The folder out/profile gets a trace and a table of the ten "
        "slowest operations.",
        metavar="STEP..STEP",
    ),
]
Tasks = Annotated[
    int | None,
    typer.Option(
        help="Number of parallel Ray tasks, by default one per CPU; 0 runs in this process, without Ray.", min=0
    ),
]
WhereColumns = Annotated[
    str, typer.Option(help="Only with --where: a Parquet or CSV file whose columns the expression may use.")
]
MaxSide = Annotated[
    int,
    typer.Option(
        help="Longest side in pixels: larger images are shrunk to it and stored as JPEGs. 0: no limit.", min=0
    ),
]
ImageChannels = Annotated[
    int,
    typer.Option(
        help="Number of channels of images that are not RGB; images with a different number are left out. 0: the "
        "images are RGB.",
        min=0,
    ),
]
