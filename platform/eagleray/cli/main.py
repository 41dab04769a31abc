"""The command line: parses arguments, nothing more."""

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from eagleray.base.console import out, print_error, silence
from eagleray.base.errors import UserError
from eagleray.base.progress import progress_bar
from eagleray.cli import catalogue, evaluate, finetune, jobs, tune
from eagleray.cli import report as report_cli
from eagleray.cli.options import Json, Overrides, RecipeName

app = typer.Typer(
    help="Pretrain vision transformers without labels, straight from WebDataset shards.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
data = typer.Typer(help="What is in a set of shards, and how fast it is read.", no_args_is_help=True)
app.add_typer(data, name="data")


@app.command()
def pretrain(name: RecipeName, overrides: Overrides = None, as_json: Json = False) -> None:
    """Pretrain a backbone, or continue: data.train=URL data.test=URL out=DIR workers=N max_steps=N seed=N ..."""
    from eagleray.cli import commands

    with silence(as_json):
        summary = commands.pretrain(name, overrides or [])
    if as_json:
        print(json.dumps(summary))


@app.command()
def shard(
    folder: Annotated[Path, typer.Argument(help="images, in class folders or not")],
    destination: Annotated[str, typer.Argument(help="folder or s3:// URL for the shards")],
    size: Annotated[int, typer.Option(help="MiB of images per shard", min=1)] = 128,
) -> None:
    """Write shards and their index from a folder of images: `prepare folder`, without Ray."""
    from eagleray.cli import commands
    from eagleray.datasets.sources.options import PrepareOptions

    commands.prepare(PrepareOptions(source="folder", origin=str(folder), destination=destination, size=size), workers=0)


@app.command()
def index(url: Annotated[str, typer.Argument(help="folder, glob or brace pattern of tars, local or s3://")]) -> None:
    """Index existing WebDataset tars, anew where they were indexed before."""
    from eagleray.data.index import write_index

    with progress_bar("shards") as progress:
        task = progress.add_task("index", total=None, rate="")
        found = write_index(url, tick=lambda done, all: progress.update(task, completed=done, total=all))
    for place, good, bad in found:
        out.print(f"{place}: {good} images" + (f", {bad} broken samples or shards" if bad else ""), markup=False)


@app.command()
def prepare(
    source: Annotated[
        str,
        typer.Argument(
            help="a name of `list datasets`, imagenet-22k, openimages, webvision, coco, folder, webdataset or parquet",
            metavar="SOURCE",
        ),
    ],
    origin: Annotated[str, typer.Argument(help="file, folder or s3:// URL of the source", metavar="FROM")],
    destination: Annotated[str, typer.Argument(help="folder or s3:// URL for the shards", metavar="DST")],
    split: Annotated[str, typer.Option(help="split of the data set; by default the first, for training")] = "",
    size: Annotated[int, typer.Option(help="MiB of source bytes per shard", min=1)] = 128,
    max_side: Annotated[int, typer.Option(help="pixels; larger images become JPEGs of this longer side", min=0)] = 0,
    min_side: Annotated[int, typer.Option(help="pixels; images with a shorter side are left out", min=0)] = 0,
    dedup: Annotated[bool, typer.Option("--dedup", help="leave out images whose bytes were there before")] = False,
    seed: Annotated[int, typer.Option(help="seed of the sample order", min=0)] = 0,
    workers: Annotated[
        int | None, typer.Option(help="Ray tasks at once; 0: in this process; all CPUs by default", min=0)
    ] = None,
    labels: Annotated[str, typer.Option(help="imagenet-1k, -100: devkit or LOC_val_solution.csv for --split val")] = "",
    images: Annotated[str, typer.Option(help="openimages: folder of the files; the public bucket by default")] = "",
    column: Annotated[str, typer.Option(help="parquet: column of the images, where there are several")] = "",
) -> None:
    """Turn a source of images into shards, index and card. The same command continues after an interruption."""
    from eagleray.cli import commands
    from eagleray.datasets.sources.options import PrepareOptions

    options = PrepareOptions(
        source=source,
        origin=origin,
        destination=destination,
        split=split,
        labels=labels,
        images=images,
        column=column,
        size=size,
        max_side=max_side,
        min_side=min_side,
        dedup=dedup,
        seed=seed,
    )
    commands.prepare(options, workers=workers)


@data.command()
def stats(
    url: Annotated[str, typer.Argument(help="folder, glob or brace pattern of shards, local or s3://")],
    destination: Annotated[Path, typer.Option("--out", help="folder for contact.png and sizes.png")] = Path("stats"),
) -> None:
    """Print what a set of shards holds, and draw a contact sheet and its sizes."""
    from eagleray.datasets import card, contact_sheet

    found, images = card.describe(url, destination)
    for line in card.lines(found):
        out.print(line, markup=False)
    destination.mkdir(parents=True, exist_ok=True)
    contact_sheet.contact(images, destination / "contact.png")
    contact_sheet.sizes(card.image_stats(found), destination / "sizes.png")
    out.print(f"{destination / 'contact.png'}, {destination / 'sizes.png'}", markup=False)


@data.command("bench")
def bench_(
    url: Annotated[str, typer.Argument(help="folder, glob or brace pattern of shards, local or s3://")],
    seconds: Annotated[float, typer.Option(help="for each stage", min=0.1)] = 3,
    as_json: Json = False,
) -> None:
    """Measure store, reader, decoding, crops and loader on this machine, and name what limits them."""
    from eagleray.data.bench import bench

    with silence(as_json):
        report = bench(url, seconds=seconds, note=lambda line: out.print(line, markup=False))
        for line in report.lines():
            out.print(line, markup=False)
    if as_json:
        print(json.dumps(report.json()))


class Target(StrEnum):
    timm = "timm"


@app.command()
def export(
    checkpoint: Annotated[str, typer.Argument(help="a checkpoint, or the folder or s3:// URL of a run")],
    to: Annotated[Target, typer.Option(help="what is to load it")] = Target.timm,
    destination: Annotated[Path | None, typer.Option(help="folder; export/ beside the checkpoints by default")] = None,
) -> None:
    """Write a checkpoint's backbone for others to load, and compare what they get."""
    from eagleray.cli import commands

    commands.export(checkpoint, destination)


@app.command()
def show(name: RecipeName, overrides: Overrides = None) -> None:
    """Print the resolved recipe, every default written out."""
    from eagleray import config
    from eagleray.runs import recipe

    print(config.dump(recipe.load(name, overrides or [])), end="")


catalogue.register(app)
evaluate.register(app)
finetune.register(app)
jobs.register(app)
report_cli.register(app)
tune.register(app)


def main() -> Any:
    """The entry point. Exit status 0: done; 2: the user's input is wrong; 1: anything else."""
    try:
        app()
    except UserError as e:
        print_error(str(e))
        sys.exit(2)
    except RuntimeError as e:
        print_error(str(e))
        sys.exit(1)


if __name__ == "__main__":
    main()
