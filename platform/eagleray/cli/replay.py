"""Define the command replay, which takes a step of a run again."""

import sys
from typing import Annotated

import typer

import eagleray
from eagleray.base.console import out
from eagleray.cli.options import Plugins


def register(app: typer.Typer) -> None:
    app.command()(replay)


def replay(
    run: Annotated[
        str, typer.Argument(help="Folder or s3:// URL of a run, which may be finished, stopped or running.")
    ],
    step: Annotated[int, typer.Option(help="Step to take again, as metrics.jsonl counts them: the first one is 1.")],
    keys: Annotated[
        bool, typer.Option("--keys", help="Print the keys of the images of the step's batch, too.")
    ] = False,
    from_start: Annotated[
        bool,
        typer.Option(
            "--from-start", help="Take all steps from the first one again where no earlier checkpoint is kept."
        ),
    ] = False,
    plugin: Plugins = None,
) -> None:
    """Take a step of a run again from the nearest earlier checkpoint, and compare its loss and gradient norm with what
    the run has recorded.

    Nothing of the run is changed. The exit status is 1 when the numbers differ."""
    again = eagleray.replay(run, step, from_start=from_start, plugins=plugin or ())
    out.print(str(again), markup=False)
    for key in again.keys if keys else ():
        out.print(key, markup=False)
    if not again.equal:
        sys.exit(1)
