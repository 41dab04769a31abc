"""Define the command report, which writes a page about runs."""

from pathlib import Path
from typing import Annotated

import typer

from eagleray.base.console import out as console


def register(app: typer.Typer) -> None:
    app.command()(report)


def report(
    runs: Annotated[
        list[str],
        typer.Argument(help="Folder or s3:// URL of a run or of a sweep. Several runs are compared on one page."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="File to write. By default report.html: in the run's folder, or here for several runs."),
    ] = None,
) -> None:
    """Write one HTML page about a run, a sweep, or several runs compared."""
    from eagleray.api import report as api

    for place in api.report(runs, out):
        console.print(place, markup=False)
