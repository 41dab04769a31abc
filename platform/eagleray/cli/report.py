"""Define the commands report and watch for pages about runs, runs, which lists runs, and track, which uses MLflow."""

import contextlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

import eagleray
from eagleray.base.console import out as console
from eagleray.base.text import aligned
from eagleray.cli.options import Json


def report(
    runs: Annotated[
        list[str],
        typer.Argument(help="Folders or s3:// URLs of runs or sweeps. The page compares several runs."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="HTML file to write. By default report.html in the run's folder, or in the working folder for "
            "several runs."
        ),
    ] = None,
) -> None:
    """Write one HTML page about a run or a sweep, or one that compares several runs."""
    for place in eagleray.report(runs, out):
        console.print(place, markup=False)


def runs(
    folder: Annotated[
        str, typer.Argument(help="Folder or s3:// URL that contains runs, at most four levels deep.")
    ] = ".",
    metric: Annotated[
        str,
        typer.Option(
            help="Metric to show, by its key in metrics.jsonl. By default knn/top1, or the loss of runs without "
            "knn/top1."
        ),
    ] = "",
    best: Annotated[
        str, typer.Option(help="Metric to show and to sort by, such as knn, with the best run first.")
    ] = "",
    as_json: Json = False,
) -> None:
    """List the runs in a folder: state, steps, and the best and newest value of a metric such as kNN accuracy."""
    from eagleray.runs.metrics import KNN_TOP1, LOSS, full_name

    wanted = full_name(best or metric or KNN_TOP1)
    found = eagleray.list_runs(folder, wanted, best=best)
    if as_json:
        print(json.dumps([asdict(run) for run in found], default=str))
        return
    unscored = not (best or metric) and any(run.best is None for run in found)
    losses = {run.name: run for run in (eagleray.list_runs(folder, LOSS) if unscored else ())}
    rows: list[tuple[str, ...]] = [("RUN", "METHOD", "STATE", "STEP", f"BEST {wanted}", "LAST", "SINCE")]
    for run in found:
        steps = f"{run.step:,}" + (f" of {run.steps:,}" if run.steps else "")
        of, scored = ("", run) if run.best is not None else (f"{LOSS} ", losses.get(run.name, run))
        scores = ["" if score is None else f"{of}{score:.4g}" for score in (scored.best, scored.last)]
        since = run.changed.astimezone().strftime("%Y-%m-%d %H:%M") if run.changed else ""
        rows.append((run.name, run.method, run.state, steps, *scores, since))
    for line in aligned(rows):
        console.print(line, markup=False, soft_wrap=True)


def track(run: Annotated[str, typer.Argument(help="Folder or s3:// URL of a run.")]) -> None:
    """Send MLflow the missing data about a run that has ended or was stopped, for example after an outage."""
    from eagleray.api import track as api

    console.print(api.track(run), markup=False, soft_wrap=True)


def watch(
    run: Annotated[str, typer.Argument(help="Folder or s3:// URL of a run or of a sweep.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of this machine; 0 takes any free port.")] = 8787,
) -> None:
    """Serve the page about a run or a sweep to browsers on this machine, and update it every ten seconds."""
    with eagleray.watch(run, port) as page:
        console.print(f"{page.url} shows {run} until Ctrl-C", markup=False)
        with contextlib.suppress(KeyboardInterrupt):
            page.wait()
