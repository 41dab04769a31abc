"""Define the command embed."""

from typing import Annotated

import typer

from eagleray.base.console import out as console
from eagleray.base.errors import UserError
from eagleray.cli.options import Plugins


def register(app: typer.Typer) -> None:
    app.command()(embed)


def embed(
    backbone: Annotated[
        str,
        typer.Argument(help="A run, a checkpoint, an export, timm:NAME, or a file of tensors with --architecture."),
    ],
    data: Annotated[str, typer.Argument(help="Shards, as for data.train, or a folder of images.", metavar="SHARDS")],
    out: Annotated[
        str | None,
        typer.Argument(
            help="Folder or s3:// URL for the Parquet files. By default one in embeddings/ beside the shards.",
            metavar="[out=FOLDER]",
        ),
    ] = None,
    features: Annotated[str, typer.Option(help="Type of features: pooled, last4 or avgpool.")] = "pooled",
    size: Annotated[
        int | None,
        typer.Option(help="Pixels of the centre crop. By default that of its evaluation.", min=1),
    ] = None,
    resize: Annotated[
        int | None, typer.Option(help="Pixels of the short side before the crop. By default likewise.", min=1)
    ] = None,
    architecture: Annotated[
        str | None, typer.Option(help="Only for a file of tensors: timm name of its architecture.")
    ] = None,
    workers: Annotated[int, typer.Option(help="Ray tasks at once. 0: no Ray, this process.", min=0)] = 0,
    gpus: Annotated[bool, typer.Option("--gpus", help="Give each of the Ray tasks a GPU.")] = False,
    plugin: Plugins = None,
) -> None:
    """Write the features of every sample as Parquet files, in the order of the index. The same command continues an
    interrupted one."""
    from eagleray.api import embed as api

    key, _, folder = (out or "").partition("=")
    if out is not None and (key != "out" or not folder):
        raise UserError(f"{out}: expected out=FOLDER")
    place = api.embed(
        backbone,
        data,
        folder or None,
        features=features,
        size=size,
        resize=resize,
        architecture=architecture,
        workers=workers,
        gpus=gpus,
        plugins=plugin or (),
    )
    console.print(f"{place}\nto read them: pandas.read_parquet({place!r})", markup=False, soft_wrap=True)
