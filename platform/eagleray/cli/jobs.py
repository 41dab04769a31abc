"""Define the commands submit, jobs, logs and stop, for runs and other long commands on a cluster."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Annotated, Any

import typer

import eagleray
from eagleray.base.console import say
from eagleray.base.text import aligned
from eagleray.base.user import user
from eagleray.cli.options import Insist, MaxHours, Plugins, complete_recipe, one_place

Address = Annotated[
    str | None,
    typer.Option(
        help="URL of the cluster's dashboard, such as http://head:8265. By default RAY_API_SERVER_ADDRESS or "
        "RAY_ADDRESS."
    ),
]
Id = Annotated[str, typer.Argument(help="Id of the run, as `eagleray jobs` shows it.", metavar="ID")]


def submit(
    name: Annotated[
        str,
        typer.Argument(
            help="Recipe: a name shown by `eagleray list recipes`, or the path of a YAML file. Or a command: pretrain, "
            "finetune, tune, evaluate, prepare or index, followed by its own arguments and options.",
            metavar="RECIPE|COMMAND",
            autocompletion=complete_recipe,
        ),
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            help="Recipe keys to change, such as optim.batch=256, or the arguments and options of the command.",
            metavar="[KEY=VALUE|WORD]...",
            callback=one_place,
        ),
    ] = None,
    plugin: Plugins = None,
    address: Address = None,
    gpus: Annotated[
        int | None, typer.Option(help="Number of workers with one GPU each, the same as workers=N gpus=true.", min=1)
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="Kind of GPU in the cluster, such as h100, for the plan of the run."),
    ] = None,
    max_hours: MaxHours = None,
    insist: Insist = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="Print the log until the run ends, and exit with the run's status.")
    ] = False,
) -> None:
    """Submit a run or another long command to a Ray cluster, where it runs without this machine. Submit an
    interrupted run again to continue it.

    The cluster must have access to out= and data.train=: use s3:// URLs or absolute paths that all nodes share."""
    from eagleray.api.job_commands import COMMANDS

    command = name if name in COMMANDS else "pretrain"
    arguments, options = parse(name, words or []) if name in COMMANDS else ([name, *(words or [])], {})
    job = eagleray.submit(
        arguments[0],
        arguments[1:],
        command=command,
        options=options,
        plugins=plugin or (),
        gpus=gpus,
        gpu=gpu,
        insist=insist,
        max_hours=max_hours,
        address=address,
        join=follow,
    )
    if follow:
        with leaving(job.id):
            sys.exit(job.follow())


def parse(command: str, words: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Return the arguments, and the options by name, that the parser of a command reads from the words after it. It
    exits with 2 for an unknown option, a wrong type or a missing argument. Raises UserError for stray words."""
    from eagleray.cli.evaluate import settings
    from eagleray.cli.main import app

    group = typer.main.get_command(app)
    context = group.commands[command].make_context(f"eagleray {command}", list(words))  # type: ignore[attr-defined]
    declared = {p.name: p for p in context.command.params}
    arguments: list[str] = []
    options: dict[str, Any] = {}
    for key, value in context.params.items():
        if declared[key].param_type_name == "argument":
            arguments += [value] if isinstance(value, str) else value or ()
        elif context.get_parameter_source(key).name == "COMMANDLINE":
            options[declared[key].opts[0].removeprefix("--").replace("-", "_")] = value
    return arguments, options | settings(context.args)


def jobs(
    address: Address = None,
    mine: Annotated[
        bool, typer.Option("--mine", help="List only your jobs, or those of the user in EAGLERAY_USER.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list and nothing else.")] = False,
) -> None:
    """List the runs and other commands that were submitted to a cluster, with their users, states, exit statuses and
    reasons for waiting."""
    runs = [job for job in eagleray.jobs(address) if not mine or job.user == user()]
    if as_json:
        print(json.dumps([{k: v for k, v in asdict(j).items() if k not in ("address", "digest")} for j in runs]))
        return
    rows = [("ID", "USER", "STATE", "COMMAND", "RECIPE", "OUT", "SINCE", "DURATION", "STATUS")]
    for j in runs:
        since = datetime.fromtimestamp(j.since).strftime("%Y-%m-%d %H:%M")
        length = str(timedelta(seconds=round(j.seconds)))
        state = "waiting" if j.waits else j.state
        status = j.killed_by or ("" if j.status is None else str(j.status))
        rows.append((j.id, j.user, state, j.command, j.recipe, j.out, since, length, status))
    for line in aligned(rows):
        say(line)
    newest = {(j.command, j.out): j for j in runs}  # jobs come oldest first, so the newest stays
    for j in runs:
        if said := j.waits or (j.message if j.state == "failed" and j is newest[j.command, j.out] else ""):
            say(f"{j.id}: {said}")


def logs(
    job: Id,
    address: Address = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Keep printing until the run ends, and exit with the run's status.")
    ] = False,
) -> None:
    """Print the log of a submitted run."""
    submitted = eagleray.job(job, address=address)
    if follow:
        with leaving(job):
            sys.exit(submitted.follow())
    for line in submitted.logs().splitlines():
        say(line)


def stop(job: Id, address: Address = None) -> None:
    """Ask a submitted run to save a checkpoint and end. Submitting the run again continues it."""
    eagleray.job(job, address=address).stop()


@contextmanager
def leaving(job: str) -> Iterator[None]:
    """A context in which Ctrl-C ends this command but not the job."""
    from eagleray.cluster.jobs import manage

    try:
        yield
    except KeyboardInterrupt:
        say(f"{job}: goes on; {manage(job)}")
        sys.exit(130)
