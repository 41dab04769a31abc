"""Define the command line and most of its commands."""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

import eagleray
from eagleray.base.console import out, print_error, say, silence
from eagleray.base.errors import Outage, UserError
from eagleray.base.files import check_local, writing
from eagleray.cli import catalogue, embed, evaluate, finetune, forget, init, jobs, plan, tune, verify
from eagleray.cli import report as report_cli
from eagleray.cli.options import (
    ImageChannels,
    Insist,
    Json,
    MaxHours,
    MaxSide,
    Overrides,
    Plugins,
    Profile,
    RecipeName,
    Tasks,
    WhereColumns,
)
from eagleray.cli.outcome import name_of, show_card, show_run
from eagleray.cli.usage import UsageError, explain

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
data = typer.Typer(help="Describe, measure, cluster and show a set of shards.", no_args_is_help=True)
app.add_typer(data, name="data", rich_help_panel="Images")


def print_version(wanted: bool) -> None:
    """Print the version and exit."""
    if wanted:
        print(f"eagleray {eagleray.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=print_version, is_eager=True)
    ] = False,
) -> None:
    """Pretrain vision transformers without labels, straight from WebDataset shards."""


def pretrain(
    name: RecipeName,
    overrides: Overrides = None,
    plugin: Plugins = None,
    profile: Profile = None,
    max_hours: MaxHours = None,
    insist: Insist = False,
    as_json: Json = False,
) -> None:
    """Pretrain a backbone. After an interruption, repeat the command to continue the run where it stopped.

    Most runs set data.train=SHARDS, out=FOLDER and workers=N (Ray workers, one GPU each; 0 runs without Ray)."""
    from eagleray.cli.early import check_run
    from eagleray.runs.named_run import one_look

    with silence(as_json), one_look():
        keys = {"profile": profile} if profile else {}
        check_run(name, overrides or (), plugin or ())
        run = eagleray.pretrain(name, overrides, plugins=plugin or (), insist=insist, max_hours=max_hours, **keys)
    show_run(run, as_json)


def shard(
    folder: Annotated[
        str,
        typer.Argument(
            help="Folder or s3:// URL of images, whose subfolders, if any, become the classes; or Parquet files, such "
            "as s3://bucket/*.parquet or hf://datasets/OWNER/NAME."
        ),
    ],
    destination: Annotated[str, typer.Argument(help="Folder or s3:// URL that the shards are written to.")],
    size: Annotated[int, typer.Option(help="Size of each shard, in MiB of images.", min=1)] = 128,
) -> None:
    """Write images as shards with an index, like `prepare folder` or `prepare parquet` with --workers 0."""
    kind = "parquet" if folder.startswith("hf://") or folder.lower().endswith(".parquet") else "folder"
    show_card(kind, folder, destination, size=size, workers=0)


def index(
    url: Annotated[
        str,
        typer.Argument(
            help="WebDataset tars or Parquet files: a folder, a glob or a brace pattern such as "
            "s3://bucket/train-{000..127}.tar, or hf://datasets/OWNER/NAME; or a folder of images."
        ),
    ],
    image: Annotated[
        str | None, typer.Option(help="Only Parquet: column of the images. Needed if several columns hold images.")
    ] = None,
    label: Annotated[
        str | None, typer.Option(help="Only Parquet: column of the classes, or none for data without classes.")
    ] = None,
) -> None:
    """Write the index of WebDataset tars, Parquet files or a folder of images, and replace an existing index."""
    for folder in eagleray.index(url, image=image, label=label):
        bad = f", {folder['bad']} broken samples or shards" if folder["bad"] else ""
        out.print(f"{folder['index']}: {folder['images']} images{bad}", markup=False)
        for line in folder["left_out"]:
            out.print(line, markup=False)


def prepare(
    source: Annotated[
        str,
        typer.Argument(
            help="Kind of source: a name shown by `eagleray list datasets`, or imagenet-22k, openimages, webvision, "
            "coco, folder, webdataset or parquet.",
            metavar="SOURCE",
        ),
    ],
    origin: Annotated[str, typer.Argument(help="File, folder or s3:// URL of the source.", metavar="FROM")],
    destination: Annotated[
        str, typer.Argument(help="Folder or s3:// URL that the shards are written to.", metavar="DST")
    ],
    split: Annotated[str, typer.Option(help="Split to read, such as val. By default the training split.")] = "",
    size: Annotated[int, typer.Option(help="Size of each shard, in MiB of source files.", min=1)] = 128,
    max_side: MaxSide = 0,
    min_side: Annotated[
        int, typer.Option(help="Leave out images whose shorter side has fewer pixels than this. 0: none.", min=0)
    ] = 0,
    dedup: Annotated[
        bool, typer.Option("--dedup", help="Leave out images whose file is byte for byte the same as an earlier file.")
    ] = False,
    channels: ImageChannels = 0,
    seed: Annotated[int, typer.Option(help="Random seed of the order of the samples.", min=0)] = 0,
    workers: Tasks = None,
    labels: Annotated[
        str,
        typer.Option(
            help="Only imagenet-1k, imagenet-100 and imagenet-10 with --split val: the devkit, or LOC_val_solution.csv."
        ),
    ] = "",
    images: Annotated[
        str,
        typer.Option(help="Only openimages: folder of the image files. By default from the public bucket."),
    ] = "",
    column: Annotated[
        str, typer.Option(help="Only parquet: column of the images. Needed if several columns hold images.")
    ] = "",
    where: Annotated[str, typer.Option(help="Only webdataset: SQL expression that is true for samples to keep.")] = "",
    columns: WhereColumns = "",
    plugin: Plugins = None,
) -> None:
    """Convert a data set into shards with an index and a data card, dataset.json.

    After an interruption, repeat the command to continue. `eagleray list datasets` prints the public data sets."""
    show_card(
        source,
        origin,
        destination,
        split=split,
        labels=labels,
        images=images,
        column=column,
        where=where,
        columns=columns,
        size=size,
        max_side=max_side,
        min_side=min_side,
        dedup=dedup,
        channels=channels,
        seed=seed,
        workers=workers,
        plugins=plugin or (),
    )


@data.command()
def stats(
    url: Annotated[
        str,
        typer.Argument(
            help="Shards: a folder, a glob or a brace pattern such as s3://bucket/train-{000..127}.tar; or a folder of "
            "images."
        ),
    ],
    folder: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for contact.png and sizes.png. By default stats/NAME."),
    ] = None,
    channels: Annotated[
        bool,
        typer.Option(
            "--channels", help="Print only the channels' means and standard deviations, as lines of a recipe."
        ),
    ] = False,
) -> None:
    """Print the numbers of images, classes and formats in shards; draw a contact sheet and the image sizes."""
    from eagleray.data.image_folder import check_outside
    from eagleray.datasets import card, contact_sheet
    from eagleray.datasets.describe import describe
    from eagleray.storage.store import absolute

    destination, source = folder or Path("stats") / name_of(url), absolute(url.rstrip("/"))
    check_local("--out", destination)
    check_outside(absolute(str(destination)), [source], "--out ")
    if (other := contact_sheet.source_of(destination / "sizes.png")) not in (None, source):
        raise UserError(f"--out {destination}: holds pictures of {other or 'something else'}; give another --out")
    with writing(f"--out {destination}"):  # before the images are read, which may take long
        destination.mkdir(parents=True, exist_ok=True)
    if channels:
        from eagleray.datasets.channel_stats import measure_channels

        for line in measure_channels(url, destination, lambda line: out.print(f"# {line}", markup=False)).lines():
            out.print(line, markup=False)
        return
    say(f"pictures come into {destination}; data without an index get index.parquet beside them")
    found, images = describe(url, destination)
    for line in card.lines(found):
        out.print(line, markup=False)
    with writing(f"--out {destination}"):
        if images:
            contact_sheet.sheet(images).save(destination / "contact.png")
        contact_sheet.sizes(card.image_stats(found), destination / "sizes.png", source)
    out.print(f"{destination / 'contact.png'}, " * bool(images) + f"{destination / 'sizes.png'}", markup=False)


@data.command("bench")
def bench_(
    url: Annotated[
        str,
        typer.Argument(help="Shards: a folder, a glob or a brace pattern such as s3://bucket/train-{000..127}.tar."),
    ],
    seconds: Annotated[float, typer.Option(help="Duration of the measurement of each stage, in seconds.", min=0.1)] = 3,
    as_json: Json = False,
) -> None:
    """Measure how fast this machine fetches, decodes and crops the images, and say which stage limits training."""
    from eagleray.data.index import list_data

    list_data(url)
    from eagleray.data.bench import bench

    with silence(as_json):
        report = bench(url, seconds=seconds, note=say)
        for line in report.lines():
            out.print(line, markup=False)
    if as_json:
        print(json.dumps(report.json()))


@data.command()
def which(
    run: Annotated[str, typer.Argument(help="Folder or s3:// URL of a run.")],
    key: Annotated[str, typer.Option(help="Key of the sample in its shard.")],
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """Print the training steps in which a run read a sample."""
    found = eagleray.which(run, key, plugins=plugin or ())
    if as_json:
        print(json.dumps(found))
        return
    for sample in found:
        steps = ", ".join(map(str, sample["steps"])) or "none"
        gone = f"; forgotten: training went on from step {sample['forgotten']}" * (sample["forgotten"] is not None)
        line = f"{sample['shard']}: {sample['key']}: read in {len(sample['steps'])} steps: {steps}{gone}"
        out.print(line, markup=False)


class Library(StrEnum):
    timm = "timm"
    timm_hub = "timm-hub"
    transformers = "transformers"
    onnx = "onnx"
    torch_export = "torch.export"


def export(
    checkpoint: Annotated[
        str,
        typer.Argument(help="A checkpoint file, or the folder or s3:// URL of a run to export its newest checkpoint."),
    ],
    to: Annotated[Library, typer.Option(help="Library that will load the backbone.")] = Library.timm,
    destination: Annotated[
        Path | None,
        typer.Option(help="Folder for the files. By default export/ or export/LIBRARY in the run's folder."),
    ] = None,
    what: Annotated[
        str | None,
        typer.Option(help="Encoder to export, such as student. By default the one that the run evaluates."),
    ] = None,
    heads: Annotated[
        bool,
        typer.Option("--heads", help="Also write heads, centres and queues, for another run's start.from."),
    ] = False,
    licence: Annotated[
        str, typer.Option(help="Licence under which you publish the weights, such as apache-2.0, for the card.")
    ] = "",
    plugin: Plugins = None,
) -> None:
    """Write the backbone of a checkpoint as files that another library loads, with a model card.

    Eagleray keeps the files only if that library loads them in a new process and computes the same features."""
    from eagleray.api.export import write

    written = write(checkpoint, destination, to=to.value, what=what, heads=heads, licence=licence, plugins=plugin or ())
    for file in written.files:
        out.print(str(file), markup=False)
    out.print(f"differs   {written.difference}\nload it   {written.line}", markup=False)
    if written.conditions:
        out.print(f"licence   {written.conditions}", markup=False)


def show(name: RecipeName, overrides: Overrides = None, plugin: Plugins = None) -> None:
    """Print a recipe as YAML with every default written out. Plug-ins are loaded only if --plugin names them."""
    from eagleray import config
    from eagleray.config import plugins
    from eagleray.runs import recipe

    plugins.use(plugin or ())
    tree = recipe.read(name, overrides or (), plugin or ())
    if missing := plugins.unnamed(tree.get("plugins") or []):
        print(f"# without defaults, as the plug-in {missing[0]!r} is not loaded: name it with --plugin")
        print(config.dump(tree), end="")
    else:
        resolved = recipe.load(name, overrides or (), plugin or (), named=True)
        print(config.dump(resolved), end="")


data.command()(embed.measure)
data.command()(embed.cluster)
data.command("map")(embed.data_map)

# Commands as `eagleray --help` shows them: by task, in the order in which a user needs them.
GROUPS: Mapping[str, Sequence[Callable[..., None]]] = {
    "Images": (shard, index, prepare, embed.curate),
    "Recipes": (init.init, catalogue.list_, show, plan.plan),
    "Training": (pretrain, finetune.finetune, tune.tune),
    "Runs": (report_cli.runs, report_cli.report, report_cli.watch, report_cli.track, forget.forget),
    "Backbones": (evaluate.evaluate, embed.embed, export, verify.verify),
    "Clusters": (jobs.submit, jobs.jobs, jobs.logs, jobs.stop),
}
# Commands that accept unknown options: settings of protocols, or options of a submitted command, are checked later.
OPEN: Mapping[Callable[..., None], dict[str, bool]] = {
    evaluate.evaluate: {"allow_extra_args": True, "ignore_unknown_options": True},
    jobs.submit: {"ignore_unknown_options": True},
}
for panel, commands in GROUPS.items():
    for command in commands:
        settings = OPEN.get(command)
        app.command(command.__name__.rstrip("_"), rich_help_panel=panel, context_settings=settings)(command)


def main() -> Any:
    """Run the command line. The exit status is 0 for success, 2 for wrong input, 75 when a store or a server did not
    answer, and 1 for any other failure."""
    try:
        sys.exit(app(prog_name="eagleray", standalone_mode=False))
    except UsageError as e:
        print_error(str(explain(e)))
        sys.exit(2)
    except typer.Abort:
        sys.exit(1)
    except UserError as e:
        print_error(str(e))
        sys.exit(2)
    except RuntimeError as e:
        print_error(str(e))
        sys.exit(os.EX_TEMPFAIL if isinstance(e, Outage) else 1)


if __name__ == "__main__":
    main()
