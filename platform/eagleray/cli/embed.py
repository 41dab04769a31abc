"""Define the commands embed, data measure and data cluster, which write tables with a row for each sample, and data
map, which shows them."""

from pathlib import Path
from typing import Annotated

import typer

import eagleray
from eagleray.base.console import out as console
from eagleray.base.errors import UserError, explained
from eagleray.cli.options import Plugins, WhereColumns

Out = Annotated[
    str | None,
    typer.Argument(
        help="Folder or s3:// URL for the Parquet files. By default beside the shards.", metavar="[out=FOLDER]"
    ),
]


def register(app: typer.Typer, data: typer.Typer) -> None:
    app.command()(embed)
    data.command()(measure)
    data.command()(cluster)
    data.command("map")(data_map)


def folder_of(out: str | None) -> str | None:
    """Return the folder of an argument such as out=FOLDER. Raises UserError for another one."""
    key, _, folder = (out or "").partition("=")
    if out is not None and (key != "out" or not folder):
        raise UserError(f"{out}: expected out=FOLDER")
    return folder or None


def show(folder: str) -> None:
    """Print where a table is, and the line that reads it."""
    console.print(f"{folder}\nto read it: pandas.read_parquet({folder!r})", markup=False, soft_wrap=True)


def embed(
    backbone: Annotated[
        str,
        typer.Argument(help="A run, a checkpoint, an export, timm:NAME, or a file of tensors with --architecture."),
    ],
    data: Annotated[str, typer.Argument(help="Shards, as for data.train, or a folder of images.", metavar="SHARDS")],
    out: Out = None,
    features: Annotated[str, typer.Option(help="Type of features: pooled, last4 or avgpool.")] = "pooled",
    size: Annotated[
        int | None,
        typer.Option(help="Pixels of the centre crop. By default as in the backbone's evaluation.", min=1),
    ] = None,
    resize: Annotated[
        int | None, typer.Option(help="Pixels of the short side before the crop; default as for --size.", min=1)
    ] = None,
    architecture: Annotated[
        str | None, typer.Option(help="Only for a file of tensors: timm name of its architecture.")
    ] = None,
    workers: Annotated[int, typer.Option(help="Ray tasks at once. 0: no Ray, this process.", min=0)] = 0,
    gpus: Annotated[bool, typer.Option("--gpus", help="Give each of the Ray tasks a GPU.")] = False,
    plugin: Plugins = None,
) -> None:
    """Write the features of every sample as Parquet files, in the order of the index. After an interruption, repeat
    the command to continue."""
    show(
        eagleray.embed(
            backbone,
            data,
            folder_of(out),
            features=features,
            size=size,
            resize=resize,
            architecture=architecture,
            workers=workers,
            gpus=gpus,
            plugins=plugin or (),
        )
    )


def measure(
    data: Annotated[str, typer.Argument(help="Shards, as for data.train, or a folder of images.", metavar="SHARDS")],
    out: Out = None,
    columns: Annotated[
        str | None,
        typer.Option(
            help="What to measure, separated by commas: size, bytes_per_pixel, luma, sharpness, entropy, colour, "
            "phash; or json.NAME, a field of the JSON beside each image. By default all but json.NAME."
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Ray tasks at once; by default one per CPU. 0: no Ray, this process.", min=0)
    ] = None,
) -> None:
    """Measure size, brightness, sharpness and more of every image, as columns for data.train.where. After an
    interruption, repeat the command to continue."""
    show(eagleray.measure(data, columns, folder_of(out), workers=workers))


def cluster(
    features: Annotated[str, typer.Argument(help="The folder that eagleray embed has written.")],
    data: Annotated[str, typer.Argument(help="The embedded data set.", metavar="SHARDS")],
    out: Out = None,
    clusters: Annotated[
        str,
        typer.Option(
            help="Numbers of clusters on each level, from the lowest up, such as 10000,1000,100. By default one per "
            "thousand images, and on each further level a tenth of the level below."
        ),
    ] = "",
    similar: Annotated[float, typer.Option(help="Least cosine similarity of near copies in a cluster.")] = 0.95,
    bits: Annotated[
        int | None,
        typer.Option(
            help="Most bits, of 63, in which the perceptual hashes (from eagleray data measure) of near copies may "
            "differ, such as 18. By default hashes are not compared.",
            min=0,
            max=63,
        ),
    ] = None,
    keep: Annotated[
        float, typer.Option(help="Share of the images that the column balance spreads evenly over clusters.")
    ] = 0.5,
    seed: Annotated[int, typer.Option(help="Seed of the first centres.", min=0)] = 0,
    workers: Annotated[int, typer.Option(help="Ray processes that share the work. 0: no Ray.", min=0)] = 0,
    gpus: Annotated[bool, typer.Option("--gpus", help="Give each of the Ray processes a GPU.")] = False,
) -> None:
    """Find the clusters and near copies in a data set from its features, and write columns for data.train.where and
    weight."""
    show(
        eagleray.find_clusters(
            features,
            data,
            folder_of(out),
            clusters=numbers(clusters),
            similar=similar,
            bits=bits,
            keep=keep,
            seed=seed,
            workers=workers,
            gpus=gpus,
        )
    )


def numbers(text: str) -> list[int]:
    """Return the numbers of a list such as 1000,100. Raises UserError for another text."""
    with explained(f"--clusters {text}: expected whole numbers, separated by commas", ValueError, why=False):
        return [int(number) for number in text.split(",") if text]


def data_map(
    data: Annotated[str, typer.Argument(help="Shards, as for data.train, or a folder of images.", metavar="SHARDS")],
    destination: Annotated[Path, typer.Option("--out", help="The HTML file.")] = Path("data.html"),
    features: Annotated[
        str | None, typer.Option(help="Folder of an embedding. By default one beside the shards.")
    ] = None,
    where: Annotated[str, typer.Option(help="Show the images that an expression like data.train.where keeps.")] = "",
    columns: WhereColumns = "",
) -> None:
    """Write a page that shows the images of a data set: a map, clusters, near copies, extremes of every column."""
    written = eagleray.data_map(data, destination, features=features, where=where, columns=columns)
    console.print(str(written), markup=False, soft_wrap=True)
