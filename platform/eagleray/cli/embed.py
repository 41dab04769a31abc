"""Define the commands embed, data measure and data cluster, which write tables with a row for each sample, data map,
which shows them, and curate, which does all of this."""

from pathlib import Path
from typing import Annotated

import typer

import eagleray
from eagleray.base.console import out as console
from eagleray.base.errors import UserError, explained
from eagleray.cli.options import Plugins, Tasks, WhereColumns

Out = Annotated[
    str | None,
    typer.Argument(
        help="Folder or s3:// URL for the Parquet files. By default beside the shards.", metavar="[out=FOLDER]"
    ),
]

Processes = Annotated[int, typer.Option(help="Number of Ray processes that share the work; 0 runs without Ray.", min=0)]
ProcessGpus = Annotated[bool, typer.Option("--gpus", help="Give each of the Ray processes a GPU.")]


def folder_of(out: str | None) -> str | None:
    """Return the folder of an argument such as out=FOLDER. Raises UserError for an argument of another form."""
    key, _, folder = (out or "").partition("=")
    if out is not None and (key != "out" or not folder):
        raise UserError(f"{out}: expected out=FOLDER")
    return folder or None


def show(folder: str) -> None:
    """Print where a table is, and the line of Python that reads it."""
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
        typer.Option(help="Size of the centre crop in pixels. By default that of the backbone's evaluation.", min=1),
    ] = None,
    resize: Annotated[
        int | None,
        typer.Option(
            help="Short side of the image in pixels before the crop. By default that of the backbone's evaluation.",
            min=1,
        ),
    ] = None,
    architecture: Annotated[
        str | None, typer.Option(help="Only for a file of tensors: the timm name of its architecture.")
    ] = None,
    workers: Annotated[
        int, typer.Option(help="Number of parallel Ray tasks; 0 runs in this process, without Ray.", min=0)
    ] = 0,
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
            "phash; or json.NAME, a field of the JSON file beside each image. By default all except json.NAME."
        ),
    ] = None,
    workers: Tasks = None,
) -> None:
    """Measure size, brightness, sharpness and more of every image, as columns for data.train.where. After an
    interruption, repeat the command to continue."""
    show(eagleray.measure(data, columns, folder_of(out), workers=workers))


def cluster(
    features: Annotated[str, typer.Argument(help="The folder that eagleray embed has written.")],
    data: Annotated[str, typer.Argument(help="The data set whose features FEATURES holds.", metavar="SHARDS")],
    out: Out = None,
    clusters: Annotated[
        str,
        typer.Option(
            help="Number of clusters on each level, lowest level first, such as 10000,1000,100. By default the "
            "lowest level has one cluster per thousand images, and each higher level a tenth of the level "
            "below."
        ),
    ] = "",
    similar: Annotated[
        float, typer.Option(help="Two images of a cluster are near copies if their cosine similarity is at least this.")
    ] = 0.95,
    bits: Annotated[
        int | None,
        typer.Option(
            help="Largest number of bits, of 63, in which the perceptual hashes of near copies may differ, such as "
            "18. The hashes come from eagleray data measure. By default hashes are not compared.",
            min=0,
            max=63,
        ),
    ] = None,
    keep: Annotated[
        float,
        typer.Option(
            help="Share of the images that the sampling weights in the column balance select, evenly from all clusters."
        ),
    ] = 0.5,
    seed: Annotated[int, typer.Option(help="Random seed of the initial cluster centres.", min=0)] = 0,
    workers: Processes = 0,
    gpus: ProcessGpus = False,
) -> None:
    """Find the clusters and near copies in a data set from its features, and write columns for data.train.where and
    data.train.weight."""
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


def curate(
    data: Annotated[str, typer.Argument(help="Shards, as for data.train, or a folder of images.", metavar="SHARDS")],
    backbone: Annotated[str, typer.Argument(help="The model that tells images apart, as for eagleray embed.")],
    out: Annotated[str, typer.Argument(help="Folder for curate.yaml and curate.html.", metavar="out=FOLDER")],
    workers: Processes = 0,
    gpus: ProcessGpus = False,
    plugin: Plugins = None,
) -> None:
    """Measure, embed and cluster images, and write a recipe's data.train that leaves out near copies, outliers and
    damaged, dark, blurred or tiny images, with a page that shows them. After an interruption, repeat the command to
    continue."""
    for name, value in eagleray.curate(
        data, backbone, folder_of(out) or "", workers=workers, gpus=gpus, plugins=plugin or ()
    ).items():
        console.print(
            f"{name}: {value:,}" if isinstance(value, int) else f"{name}: {value}", markup=False, soft_wrap=True
        )


def numbers(text: str) -> list[int]:
    """Return the numbers in a list such as 1000,100. Raises UserError for text of another form."""
    with explained(f"--clusters {text}: expected whole numbers, separated by commas", ValueError, why=False):
        return [int(number) for number in text.split(",") if text]


def data_map(
    data: Annotated[str, typer.Argument(help="Shards, as for data.train, or a folder of images.", metavar="SHARDS")],
    destination: Annotated[Path, typer.Option("--out", help="HTML file to write.")] = Path("data.html"),
    features: Annotated[
        str | None,
        typer.Option(help="The folder that eagleray embed has written, by default the one beside the shards."),
    ] = None,
    where: Annotated[
        str, typer.Option(help="SQL expression, as for data.train.where; the page shows the images that it selects.")
    ] = "",
    columns: WhereColumns = "",
) -> None:
    """Write an HTML page about the images of a data set: a map, clusters, near copies, extremes of each column."""
    written = eagleray.data_map(data, destination, features=features, where=where, columns=columns)
    console.print(str(written), markup=False, soft_wrap=True)
