"""Index data, prepare data sets, and say what a run has read."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from eagleray.api.run import Run
from eagleray.base.console import say
from eagleray.base.errors import UserError
from eagleray.base.numbers_given import whole
from eagleray.base.progress import PhaseProgress, counting, progress_bar
from eagleray.cluster.ray_map import ray_map, scanner
from eagleray.config import plugins as loading
from eagleray.config.source import Source
from eagleray.data.image_folder import address
from eagleray.data.index import open_shown, write_index
from eagleray.data.index_faults import faults_of
from eagleray.datasets import card
from eagleray.datasets import measure as measuring
from eagleray.datasets import prepare as preparing
from eagleray.datasets.sources.source import PrepareOptions
from eagleray.engine.checkpoint_files import names_in
from eagleray.evaluation.embeddings import open_embedding
from eagleray.runs import layout
from eagleray.runs import recipe as recipes
from eagleray.storage.store import absolute


def index(
    data: str | Path | Sequence[str], *, image: str | None = None, label: str | None = None
) -> list[dict[str, Any]]:
    """Rebuild the index of WebDataset tars, Parquet files or a folder of images.

    Eagleray indexes data automatically at the first use. Call `index` if you have changed the data after that. If
    several columns of Parquet files may hold images or labels, `image` and `label` name the columns to read. The index
    stores this choice.

    Returns a dictionary for every folder: the URL of the index file (`index`), the numbers of usable images (`images`)
    and of broken samples (`bad`), and the reasons why samples are left out (`left_out`, one line each). Raises
    UserError and Outage.

    Example:

        [folder] = eagleray.index("shards/")
        folder["images"], folder["bad"]
    """
    urls = [str(url) for url in ([data] if isinstance(data, str | Path) else data)]
    sources = [Source(url=url, image=image, label=label) for url in urls]

    with counting("indexing", "files") as tick:
        folders = write_index(sources, note=say, tick=tick, scan_all=scanner())
    return [
        {"index": url, "images": images, "bad": bad, "left_out": list(faults_of(url).lines())}
        for url, images, bad in folders
    ]


def prepare(
    source: str,
    origin: str | Path,
    destination: str | Path,
    *,
    split: str = "",
    size: int = 128,
    max_side: int = 0,
    min_side: int = 0,
    dedup: bool = False,
    channels: int = 0,
    seed: int = 0,
    workers: int | None = None,
    labels: str | Path = "",
    images: str | Path = "",
    column: str = "",
    where: str = "",
    columns: str | Path = "",
    plugins: Sequence[str | Path] = (),
    command: str | None = None,
) -> dict[str, Any]:
    """Turn a source of images into shards with an index and a data card, and return the card. After an interruption,
    repeat the call to continue.

    `source` is `folder`, `webdataset`, `parquet` or the name of a public dataset from `eagleray list datasets`.
    `origin` is the file, folder or s3:// URL of the source, and `destination` is the folder or s3:// URL for the
    shards. `size` is the number of MiB of source images in each shard. If the longer side of an image is above
    `max_side` pixels, `prepare` shrinks it to `max_side` and stores a JPEG. `prepare` leaves out images whose shorter
    side is below `min_side` pixels and, with `dedup=True`, exact copies. `channels` is the number of channels of images
    that are not RGB. `seed` sets the random order of the samples. `workers` is the number of parallel Ray tasks, by
    default one per CPU; 0 runs all work in this process. `split`, `labels`, `images`, `column`, `where` and `columns`
    apply only to some sources. `plugins` lists files and modules to load, such as a source of your own. The card stores
    the text `command`, by default the equivalent command line.

    Raises UserError and Outage.

    Example:

        card = eagleray.prepare("folder", "photos/", "prepared/", workers=0)
        card["images"]
    """
    loading.use(plugins)
    workers = workers and whole("workers", workers, 0)
    options = PrepareOptions(
        source=source,
        origin=str(origin),
        destination=str(destination),
        split=split,
        labels=str(labels),
        images=str(images),
        column=column,
        where=where,
        columns=str(columns),
        size=size,
        max_side=max_side,
        min_side=min_side,
        dedup=dedup,
        channels=channels,
        seed=seed,
    ).resolved()
    with PhaseProgress() as ticks:
        return preparing.prepare(
            options,
            run=map if workers == 0 else partial(ray_map, workers=workers),
            command=command or card.command(["prepare", source, str(origin), str(destination), *_options(options)]),
            note=say,
            tick=ticks,
        )


def measure(
    data: str | Path,
    columns: str | Sequence[str] | None = None,
    out: str | Path | None = None,
    *,
    workers: int | None = None,
) -> str:
    """Measure every image of a data set, write the results to Parquet files, and return the folder of these files.
    After an interruption, repeat the call to continue.

    `data` is a folder, a pattern or an s3:// URL of shards, or a folder of images. `columns` lists the columns to
    compute, like `--columns` of `eagleray data measure`; the name `json.NAME` copies a field of the JSON file beside
    each image. By default `measure` computes all columns except `json.NAME`. `out` is the folder or s3:// URL for the
    Parquet files. By default they go beside the shards, where `data.train.where` finds them. `workers` is the number of
    parallel Ray tasks, by default one per CPU; 0 runs all work in this process.

    Raises UserError and Outage.

    Example:

        import pandas

        folder = eagleray.measure("shards/", "size,luma", "measured/", workers=0)
        pandas.read_parquet(folder)["min_side"].min()
    """
    names = columns.split(",") if isinstance(columns, str) else columns or ()
    workers = workers and whole("workers", workers, 0)
    with progress_bar("images") as progress:
        task = progress.add_task("measuring", total=None, rate="")
        return measuring.measure(
            absolute(str(data)),
            absolute(str(out).rstrip("/")) if out else None,
            [name.strip() for name in names],
            run=map if workers == 0 else partial(ray_map, workers=workers),
            note=say,
            tick=lambda done, total: progress.update(task, completed=done, total=total),
        ).folder


def data_map(
    data: str | Path,
    out: str | Path = "data.html",
    *,
    features: str | Path | None = None,
    where: str = "",
    columns: str | Path = "",
) -> Path:
    """Write one HTML file that shows a data set, and return the path of this file.

    The page shows a map of the features, the clusters, pairs of near copies, the images that `where` selects, and each
    column's distribution and most extreme images. `data_map` reads the results of `measure`, `embed` and
    `find_clusters` beside the shards. `data` is a folder, pattern or s3:// URL of shards, or a folder of images.
    `features` is the folder that `embed` has written, by default one beside the shards. `where` is an SQL expression
    like `data.train.where`, and `columns` is a Parquet or CSV file with columns for it. Raises UserError and Outage.

    Example:

        eagleray.data_map("shards/", "data.html", where="bytes > 2000")
    """
    url = absolute(str(data))
    found = open_shown(url, note=say)
    table = open_embedding(absolute(str(features).rstrip("/")), found) if features else None
    from eagleray.reports import data_map as mapping

    path = Path(out)
    mapping.data_map(url, found, path, features=table, where=where, columns=str(columns) and absolute(str(columns)))
    return path


def which(run: str | Path | Run, key: str, *, plugins: Sequence[str | Path] = ()) -> list[dict[str, Any]]:
    """Return the training steps in which a run read the samples with a key, for example to answer a takedown request.

    The result has a dictionary for each sample, with its `shard`, its `key` and the list `steps`. Steps count from 1.
    If the run has forgotten the sample, `forgotten` is the step from which training went on without it, else None.
    `which` computes the steps from the recipe and the index, without reading images. If an image could not be decoded
    or is forgotten, the run read a neighbouring image instead, to which the step counts. `plugins` lists files and
    modules to load, such as the run's own.

    Raises UserError if the run, the key or the data does not exist or the data have changed, and Outage if a store does
    not answer.

    Example:

        for sample in eagleray.which("runs/a", "000000_plain_circle"):
            print(sample["shard"], sample["steps"])
    """
    loading.use(plugins)
    opened = Run(run)
    recipe = recipes.load(str(opened.folder / layout.RECIPE), named=True)
    from eagleray.api.forget import check_unchanged, steps_taken
    from eagleray.data.sample_uses import samples_with, steps_with
    from eagleray.engine import checkpoint
    from eagleray.runs.forgotten import read_forgotten, samples_of, unread_samples
    from eagleray.runs.plan import opened_again

    with opened_again(replace(recipe, out=opened.out)) as plan:
        check_unchanged(plan, opened)
        index, lines = plan.index, read_forgotten(opened.out)
        found = list(samples_with(index, key))
        if not found:
            raise UserError(f"--key {key}: no sample of the training data has this key")
        [name] = index.keys(found[0], found[0] + 1)  # the key as it is stored
        since = {sample: line["step"] for line in lines if line["key"] == name for sample in samples_of(index, [line])}
        bad = unread_samples(index, opened.folder)
        stop = steps_taken(opened, names_in(checkpoint.blobs_of(f"{opened.out}/{layout.CHECKPOINTS}")))
        return [
            {
                "shard": address(index.rows(sample, sample + 1).blob),
                "key": key,
                "steps": [step + 1 for step in steps],
                "forgotten": since.get(sample),
            }
            for sample, steps in zip(found, steps_with(plan.stream, found, stop, bad), strict=True)
        ]


def _options(options: PrepareOptions) -> list[str]:
    """Return the options of the command line that differ from their defaults."""
    plain = PrepareOptions(source=options.source, origin=options.origin, destination=options.destination).identity()
    given = {k: v for k, v in options.identity().items() if v != plain.get(k)}
    return [word for k, v in given.items() for word in ([k] if v is True else [k, str(v)])]
