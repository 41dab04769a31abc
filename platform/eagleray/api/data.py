"""Index data, prepare data sets, and say what a run has read."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from eagleray.api.run import Run
from eagleray.base.console import say
from eagleray.base.errors import UserError
from eagleray.base.files import read_history
from eagleray.base.progress import PhaseProgress, progress_bar
from eagleray.cluster.ray_map import ray_map
from eagleray.cluster.scan_shards import scanner
from eagleray.config import plugins as loading
from eagleray.data.image_folder import address
from eagleray.data.index import open_index, write_index
from eagleray.data.index_faults import faults_of
from eagleray.data.index_file import aside_in
from eagleray.datasets import card
from eagleray.datasets import measure as measuring
from eagleray.datasets import prepare as preparing
from eagleray.datasets.sources.options import PrepareOptions
from eagleray.evaluation.embeddings import open_embedding
from eagleray.runs import layout
from eagleray.runs import recipe as recipes
from eagleray.storage import store
from eagleray.storage.store import absolute


def index(data: str | Path | Sequence[str]) -> list[dict[str, Any]]:
    """Index existing WebDataset tars or a folder of images again. Returns a dictionary for every folder: `index` is the
    URL of the index file, `images` the number of usable images, `bad` that of broken samples, and `left_out` says in a
    line for each reason what is not used.

    Data without an index is indexed when it is first used; call this after the data has changed. Raises UserError and
    Outage.

    Example:

        [folder] = eagleray.index("shards/")
        folder["images"], folder["bad"]
    """
    urls = str(data) if isinstance(data, str | Path) else list(data)

    with progress_bar("shards") as progress:
        task = progress.add_task("index", total=None, rate="")

        def tick(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        folders = write_index(urls, note=say, tick=tick, scan_all=scanner())
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
    """Turn a source of images into shards with their index and card, and return the card. The same call continues
    after an interruption.

    `source` is `folder`, `webdataset`, `parquet` or the name of a public dataset, as `eagleray list datasets` prints
    them; `origin` is its file, folder or s3:// URL, and `destination` a folder or s3:// URL for the shards. `size` is
    MiB of source bytes per shard. Images with a longer side above `max_side` pixels become JPEGs of that size, and
    those with a shorter side below `min_side` are left out, as are exact copies with `dedup`. `channels` is the number
    of those of images that are not in red, green and blue. `seed` shuffles. `workers` are Ray tasks at once, by
    default as many as there are CPUs; 0 means this process. `split`, `labels`, `images`, `column`, `where` and
    `columns` are for some sources only: docs/prepare.md. `plugins` are files and modules to load, such as one with a
    source of your own. `command` is kept in the card, by default the equal command of the command line.

    Raises UserError and Outage.

    Example:

        card = eagleray.prepare("folder", "photos/", "prepared/", workers=0)
        card["images"]
    """
    loading.use(plugins)
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
    """Write measures of every image of a data set as Parquet files beside the shards, where `data.train.where` finds
    them, and return their folder. The same call continues after an interruption.

    `data` is a folder, a pattern or an s3:// URL of shards, or a folder of images. `columns` names measures, which
    docs/select.md describes, by default all of pixels; `json.NAME` is a field of the JSON beside each image. `out` is a
    folder or s3:// URL for them instead. `workers` are Ray tasks at once, by default as many as there are CPUs; 0 means
    this process.

    Raises UserError and Outage.

    Example:

        import pandas

        folder = eagleray.measure("shards/", "size,luma", "measured/", workers=0)
        pandas.read_parquet(folder)["min_side"].min()
    """
    names = columns.split(",") if isinstance(columns, str) else columns or ()
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
    """Write one HTML file that shows a data set, and return its path: a map of its features, its clusters, near copies
    side by side, the distribution of every column with the images at its ends, and what `where` would keep.

    `data` is a folder, a pattern or an s3:// URL of shards, or a folder of images. The page shows what `measure`,
    `embed` and `find_clusters` have written beside the shards; `features` names the folder of another embedding.
    `where` is an expression as for `data.train.where`, and `columns` a Parquet or CSV file with columns for it.

    Raises UserError and Outage.

    Example:

        eagleray.data_map("shards/", "data.html", where="bytes > 2000")
    """
    url = absolute(str(data))
    found = open_index(url, note=say)
    table = open_embedding(absolute(str(features).rstrip("/")), found) if features else None
    from eagleray.reports import data_map as mapping

    path = Path(out)
    mapping.data_map(url, found, path, features=table, where=where, columns=str(columns) and absolute(str(columns)))
    return path


def which(run: str | Path | Run, key: str, *, plugins: Sequence[str | Path] = ()) -> list[dict[str, Any]]:
    """Return in which steps of a run the samples with a key were read, such as to answer a request to take an image
    down: a dictionary for each sample, with its `shard`, `key` and `steps`, which are counted from 1.

    The steps follow from the recipe and the data, whose images are not read. An image that does not decode was replaced
    by another one of its block, as quarantine.jsonl of the run says. `plugins` are files and modules to load,
    among them those of the run, which are code and not loaded by themselves.

    Raises UserError when there is no such run or key, or the data is not there, and Outage when a store stays away.

    Example:

        for sample in eagleray.which("runs/a", "000000_plain_circle"):
            print(sample["shard"], sample["steps"])
    """
    loading.use(plugins)
    opened = Run(run)
    recipe = recipes.load(str(opened.folder / layout.RECIPE), named=True)
    from eagleray.data.sample_uses import samples_with, steps_with
    from eagleray.runs.plan import open_plan

    with TemporaryDirectory(prefix="eagleray-which-") as scratch:
        for blob in aside_in(opened.out):  # indexes of data that is not the run's own
            (Path(scratch) / blob.url.rpartition("/")[2]).write_bytes(store.store(opened.out).get(blob.url))
        data = replace(recipe.data, test=None)
        plan = open_plan(replace(recipe, out=scratch, data=data), note=lambda _: None)
        found = list(samples_with(plan.index, key))
        if not found:
            raise UserError(f"--key {key}: no sample of the training data has this key")
        stop = max((line["step"] for line in read_history(opened.folder / layout.METRICS)), default=0)
        return [
            {
                "shard": address(plan.index.rows(sample, sample + 1).blob),
                "key": key,
                "steps": [step + 1 for step in steps],
            }
            for sample, steps in zip(found, steps_with(plan.stream, found, stop), strict=True)
        ]


def _options(options: PrepareOptions) -> list[str]:
    """Return the options of the command line that differ from their defaults."""
    plain = PrepareOptions(source=options.source, origin=options.origin, destination=options.destination).identity()
    given = {k: v for k, v in options.identity().items() if v != plain.get(k)}
    return [word for k, v in given.items() for word in ([k] if v is True else [k, str(v)])]
