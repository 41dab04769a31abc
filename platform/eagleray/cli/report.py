"""The command for a page about runs: report."""

from pathlib import Path
from typing import Annotated

import typer

from eagleray.base.console import out as console


def register(app: typer.Typer) -> None:
    app.command()(report)


def report(
    runs: Annotated[list[str], typer.Argument(help="folder or s3:// URL of a run; several are compared; or a sweep's")],
    out: Annotated[
        Path | None, typer.Option(help="file; report.html in the run's folder, of several runs in this one, by default")
    ] = None,
) -> None:
    """Write one HTML page about a run, a sweep, or several runs compared."""
    from eagleray.reports import write

    for place in write.report(runs, out):
        console.print(place, markup=False)
