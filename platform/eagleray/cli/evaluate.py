"""Define the command evaluate."""

import json
import os
import sys
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer

import eagleray
from eagleray.base.console import out, silence
from eagleray.base.errors import UserError
from eagleray.cli.options import Json, Plugins


class Format(StrEnum):
    text = "text"
    markdown = "markdown"
    latex = "latex"
    json = "json"


Folder = Annotated[
    str | None,
    typer.Option(
        "--out", help="Folder for results.json and pictures. By default the run's folder, or evaluations/NAME."
    ),
]
Suite = Annotated[
    str | None,
    typer.Option(help="Folder or s3:// URL with shards in NAME/SPLIT, such as pets/test, for the suite protocol."),
]
Architecture = Annotated[
    str | None,
    typer.Option(help="Only for a file of tensors: the timm name of its architecture, such as vit_small_patch16_224."),
]


def first(backbone: str) -> str:
    """Return the argument `backbone`. Raises UserError if it is an option, which the parser has taken for it."""
    if backbone.startswith("-"):
        raise UserError(f"{backbone}: expected the backbone before all options")
    return backbone


def evaluate(
    context: typer.Context,
    backbone: Annotated[
        str,
        typer.Argument(
            help="A run or its checkpoint, timm:NAME, a file of tensors with --architecture, or untrained:NAME.",
            callback=first,
        ),
    ],
    train: Annotated[str | None, typer.Option(help="Training data. kNN and the probes need labels.")] = None,
    test: Annotated[str | None, typer.Option(help="Test data. By default a tenth of --train.")] = None,
    protocol: Annotated[
        str, typer.Option(help="Protocols, separated by commas: names shown by `eagleray list protocols`.")
    ] = "knn,linear",
    coco: Annotated[str | None, typer.Option(help="Folder or s3:// URL in COCO's layout, for detection.")] = None,
    masks: Annotated[
        str | None, typer.Option(help="Folder or s3:// URL of images with masks, for segmentation.")
    ] = None,
    davis: Annotated[str | None, typer.Option(help="Folder or s3:// URL in DAVIS's layout, for davis.")] = None,
    suite: Suite = None,
    architecture: Architecture = None,
    untrained: Annotated[
        bool, typer.Option("--untrained", help="For comparison, also evaluate the architecture with random weights.")
    ] = False,
    workers: Annotated[
        int,
        typer.Option(
            help="Number of Ray workers that share the work of most protocols; 0 runs in this process, without Ray.",
            min=0,
        ),
    ] = 0,
    gpus: Annotated[bool, typer.Option("--gpus", help="Give each of the Ray workers a GPU.")] = False,
    plugin: Plugins = None,
    form: Annotated[
        Format,
        typer.Option(
            "--format",
            help="Output format. text prints a line for each protocol; the others print a table with all numbers and "
            "settings.",
        ),
    ] = (Format.text),
    folder: Folder = None,
    as_json: Json = False,
) -> None:
    """Evaluate a backbone with one or several protocols, and print a line for each.

    --SETTING VALUE, such as --k 10, changes a setting in all protocols that have it.
    `eagleray list protocols` shows the settings and their defaults."""
    options = {
        "train": train,
        "test": test,
        "protocols": protocol,
        "coco": coco,
        "masks": masks,
        "davis": davis,
        "suite": suite,
        "architecture": architecture,
        "untrained": untrained,
        "workers": workers,
        "gpus": gpus,
        "plugins": plugin or (),
        "out": folder,
    }
    show_scores(backbone, options | settings(context.args), form, as_json)


def show_scores(backbone: str, options: dict[str, Any], form: Format, as_json: bool) -> None:
    """Evaluate, print the scores, and exit with status 2 when a protocol could not be run."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences PyTorch's profiler; read when torch is imported
    refused = False
    with silence(as_json or form is Format.json):
        try:
            scores = eagleray.evaluate(backbone, **options)
        except eagleray.Refused as e:  # the reasons were printed when the protocols were refused
            scores, refused = e.scores, True
    if as_json:
        print(json.dumps(scores))
    elif scores.results:
        print(scores.table(form.value))
        if form is not Format.json:
            out.print(f"results   {scores.out}/results.json: all numbers and settings", markup=False)
    if refused:
        sys.exit(2)


def settings(words: Sequence[str]) -> dict[str, str]:
    """Parse `--k 10` and `--k=10` into settings by name. Raises UserError for words of another form."""
    found: dict[str, str] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        key, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not key or not (equals or rest):
            raise UserError(f"{word}: expected --SETTING VALUE after the backbone")
        if key in ("backbone", "plugins", "protocols"):  # arguments of eagleray.evaluate, but no settings
            raise UserError(f"--{key}: no such option; `eagleray evaluate --help` lists the options")
        found[key.replace("-", "_")] = value if equals else rest.pop(0)
    return found
