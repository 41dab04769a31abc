"""The command line: parses arguments, nothing more."""

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from eagleray.console import bar, counted, fail, out, quietly
from eagleray.errors import UserError

app = typer.Typer(
    help="Pretrain vision transformers without labels, straight from WebDataset shards.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
Overrides = Annotated[
    list[str] | None, typer.Argument(help="recipe keys, such as optim.batch=256", metavar="[KEY=VALUE]...")
]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")]
RecipeName = Annotated[str, typer.Argument(help="a name of `eagleray list recipes`, or a YAML file", metavar="RECIPE")]


@app.command()
def pretrain(name: RecipeName, overrides: Overrides = None, as_json: Json = False) -> None:
    """Pretrain a backbone, or continue: data.train=URL data.test=URL out=DIR workers=N max_steps=N seed=N ..."""
    from eagleray import launch

    with quietly(as_json):
        summary = launch.pretrain(name, overrides or [])
    if as_json:
        print(json.dumps(summary))


@app.command()
def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="a checkpoint, or the folder of a run")],
    train: Annotated[str, typer.Option(help="labelled shards to learn from")],
    test: Annotated[str | None, typer.Option(help="labelled shards to test on")] = None,
    protocol: Annotated[str, typer.Option(help="knn, linear or both, comma-separated")] = "knn,linear",
    as_json: Json = False,
) -> None:
    """Evaluate a checkpoint's frozen features."""
    from eagleray import launch

    with quietly(as_json):
        scores = launch.evaluate(checkpoint, train, test, protocol.split(","))
    if as_json:
        print(json.dumps(scores))


@app.command()
def shard(
    folder: Annotated[Path, typer.Argument(help="images, in class folders or not")],
    destination: Annotated[str, typer.Argument(help="folder or s3:// URL for the shards")],
    size: Annotated[int, typer.Option(help="MiB of images per shard", min=1)] = 128,
) -> None:
    """Write WebDataset shards and their index from a folder of images."""
    from eagleray.data.shards import Images, write_shards

    images = Images.below(folder)
    skipped: list[str] = []
    samples = images.read(lambda path, why: skipped.append(f"{path}: {why}"))
    counted_samples = counted("images", "shard", samples, len(images))
    shards, written = write_shards(counted_samples, destination, size=size * 2**20)
    for line in skipped[:5]:
        out.print(f"skipped {line}", markup=False)
    if len(skipped) > 5:
        out.print(f"skipped {len(skipped) - 5} more files that are no images")
    classes = f" of {len(images.classes)} classes" if images.classes else ""
    out.print(f"{written} images{classes} in {shards} shard(s), and index.parquet, in {destination}", markup=False)


@app.command()
def index(url: Annotated[str, typer.Argument(help="folder, glob or brace pattern of tars, local or s3://")]) -> None:
    """Index existing WebDataset tars, anew where they were indexed before."""
    from eagleray.data.index import write_index

    with bar("shards") as progress:
        task = progress.add_task("index", total=None, rate="")
        found = write_index(url, tick=lambda done, all: progress.update(task, completed=done, total=all))
    for place, good, bad in found:
        out.print(f"{place}: {good} images" + (f", {bad} broken samples or shards" if bad else ""), markup=False)


class Target(StrEnum):
    timm = "timm"


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="a checkpoint, or the folder of a run")],
    to: Annotated[Target, typer.Option(help="what is to load it")] = Target.timm,
    destination: Annotated[Path | None, typer.Option(help="folder; export/ beside the checkpoints by default")] = None,
) -> None:
    """Write a checkpoint's backbone for others to load, and compare what they get."""
    from eagleray import launch

    launch.export(checkpoint, destination)


@app.command()
def show(name: RecipeName, overrides: Overrides = None) -> None:
    """Print the resolved recipe, every default written out."""
    from eagleray import config, recipe

    print(config.dump(recipe.load(name, overrides or [])), end="")


class Kind(StrEnum):
    methods = "methods"
    backbones = "backbones"
    recipes = "recipes"


@app.command("list")
def list_(kind: Annotated[Kind, typer.Argument()], as_json: Json = False) -> None:
    """List methods, tested backbones, or recipes with their headers."""
    from eagleray import launch

    rows = launch.catalogue(kind.value)
    if as_json:
        print(json.dumps(rows))
    else:
        for name, text in rows.items():
            out.print(f"{name:<36} {text}", markup=False)


def main() -> Any:
    """The entry point. Exit status 0: done; 2: the user's input is wrong; 1: anything else."""
    try:
        app()
    except UserError as e:
        fail(str(e))
        sys.exit(2)
    except RuntimeError as e:
        fail(str(e))
        sys.exit(1)


if __name__ == "__main__":
    main()
