"""Define the commands submit, jobs, logs and stop, for runs on a cluster."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Annotated

import typer

from eagleray.base.console import out
from eagleray.cli.options import Insist, Overrides, Plugins, RecipeName

Address = Annotated[
    str | None,
    typer.Option(
        help="Dashboard of the cluster, such as http://head:8265. By default RAY_API_SERVER_ADDRESS or RAY_ADDRESS."
    ),
]
Id = Annotated[str, typer.Argument(help="Id of the run, as `eagleray jobs` shows it.", metavar="ID")]


def register(app: typer.Typer) -> None:
    for command in (submit, jobs, logs, stop):
        app.command()(command)


def say(line: str) -> None:
    out.print(line, markup=False)


def submit(
    name: RecipeName,
    overrides: Overrides = None,
    plugin: Plugins = None,
    address: Address = None,
    gpus: Annotated[
        int | None, typer.Option(help="Number of workers, one GPU each. Short for workers=N gpus=true.", min=1)
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="Kind of GPU in the cluster, such as h100, to plan the run for: docs/plan.md lists them."),
    ] = None,
    insist: Insist = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="Print the log until the run ends, and exit with its status.")
    ] = False,
) -> None:
    """Send a run to a Ray cluster, where it goes on without this machine. Sent again, an interrupted run continues.

    The cluster must reach out= and data.train=, so they are s3:// URLs or absolute paths shared by all nodes."""
    from eagleray.api import jobs as api

    job = api.submit(
        name, overrides, plugins=plugin or (), gpus=gpus, gpu=gpu, insist=insist, address=address, join=follow
    )
    if follow:
        with leaving(job.id):
            sys.exit(job.follow())


def jobs(
    address: Address = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list and nothing else.")] = False,
) -> None:
    """List the runs that were submitted to a cluster, with their state and exit status."""
    from eagleray.api import jobs as api

    runs = api.jobs(address)
    if as_json:
        print(json.dumps([{k: v for k, v in asdict(j).items() if k not in ("address", "digest")} for j in runs]))
        return
    rows = [("ID", "STATE", "RECIPE", "OUT", "SINCE", "DURATION", "STATUS")]
    for j in runs:
        since = datetime.fromtimestamp(j.since).strftime("%Y-%m-%d %H:%M")
        length = str(timedelta(seconds=round(j.seconds)))
        rows.append((j.id, j.state, j.recipe, j.out, since, length, "" if j.status is None else str(j.status)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        say("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def logs(
    job: Id,
    address: Address = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on printing until the run ends, and exit with its status.")
    ] = False,
) -> None:
    """Print the log of a submitted run."""
    from eagleray.api import jobs as api

    submitted = api.job(job, address=address)
    if follow:
        with leaving(job):
            sys.exit(submitted.follow())
    for line in submitted.logs().splitlines():
        say(line)


def stop(job: Id, address: Address = None) -> None:
    """Ask a submitted run to save a checkpoint and end. Submitting it again continues it."""
    from eagleray.api import jobs as api

    api.job(job, address=address).stop()


@contextmanager
def leaving(job: str) -> Iterator[None]:
    """A context in which Ctrl-C ends this command but not the job."""
    from eagleray.cluster.jobs import manage

    try:
        yield
    except KeyboardInterrupt:
        say(f"{job}: goes on; {manage(job)}")
        sys.exit(130)
