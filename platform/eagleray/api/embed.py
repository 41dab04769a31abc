"""Embed the samples of a data set, and cluster them by their features."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from eagleray.api.run import Run
from eagleray.base.console import say
from eagleray.base.errors import UserError
from eagleray.base.numbers_given import share, whole
from eagleray.config import plugins as loading
from eagleray.evaluation.given import check_backbone, check_data, check_gpus
from eagleray.storage.store import absolute


def embed(
    backbone: str | Path | Run,
    data: str | Path,
    out: str | Path | None = None,
    *,
    features: str = "pooled",
    size: int | None = None,
    resize: int | None = None,
    architecture: str | None = None,
    workers: int = 0,
    gpus: bool = False,
    plugins: Sequence[str | Path] = (),
) -> str:
    """Write the features of every sample of a data set as Parquet files, in the order of its index, and return their
    folder. The same call continues after an interruption.

    `backbone` is a run, a checkpoint, an export, `timm:NAME`, or a file of tensors with timm's name of its
    `architecture`; `data` is a folder, a pattern or an s3:// URL of shards, or a folder of images. `out` is a folder or
    s3:// URL, by default one in `embeddings/` beside the shards. `features` are `pooled`, `last4` or `avgpool`, of
    images whose short side is resized to `resize` pixels and whose centre of `size` pixels is cut out, by default as
    the backbone's own evaluation does. `workers` are Ray tasks at once, 0 means this process; with `gpus=True` each has
    a GPU. `plugins` are files and modules to load.

    Raises UserError when something is wrong, also when `out` has the features of another backbone or of other images,
    and Outage when a store does not answer.

    Example:

        import pandas

        folder = eagleray.embed("runs/a", "shards/", "features/")
        table = pandas.read_parquet(folder)  # columns shard, key, label and feature
        len(table)
    """
    loading.use(plugins)
    check_gpus(gpus, workers)
    check_backbone(os.fspath(backbone), architecture)
    check_data(os.fspath(data))
    from eagleray.evaluation import embed as embedding
    from eagleray.evaluation.target import load_target

    return embedding.embed(
        load_target(os.fspath(backbone), architecture),
        absolute(str(data)),
        absolute(str(out).rstrip("/")) if out else None,
        kind=features,
        size=size,
        resize=resize,
        architecture=architecture,
        workers=workers,
        gpus=gpus,
        note=say,
    ).folder


def find_clusters(
    features: str | Path,
    data: str | Path,
    out: str | Path | None = None,
    *,
    clusters: Sequence[int] = (),
    similar: float = 0.95,
    bits: int | None = None,
    keep: float = 0.5,
    seed: int = 0,
    workers: int = 0,
    gpus: bool = False,
) -> str:
    """Find the clusters and the near copies of a data set by its features, write them as columns beside the shards,
    where `data.train.where` and `weight` find them, and return their folder.

    `features` is the folder that `embed` has written, and `data` what it has embedded. `clusters` are the numbers of
    clusters of each level, from the lowest up, by default a thousandth of the samples and a tenth of the level below.
    Images of a cluster whose cosine similarity is at least `similar` count as copies of the one with the largest file;
    with `bits` only those whose perceptual hashes, which `measure` writes, differ in at most so many of 63 bits.
    The column `balance` is a weight that shares out a part `keep` of the images evenly among clusters. `seed` draws the
    first centres. `workers` are Ray processes that share the work, 0 means this one; with `gpus=True` each has a GPU.
    `out` is a folder or s3:// URL for the columns.

    Raises UserError when something is wrong, also when `features` are those of other images, and Outage when a store
    does not answer.

    Example:

        import pandas

        features = eagleray.embed("runs/a", "shards/", "features-of-a/")
        folder = eagleray.find_clusters(features, "shards/", "clusters/", clusters=[8])
        pandas.read_parquet(folder)["duplicate_of"].isna().mean()
    """
    if not isinstance(clusters, Iterable):
        raise UserError(f"clusters={clusters!r}: expected a list of whole numbers, such as [{clusters!r}]")
    clusters, seed = [whole("clusters", number) for number in clusters], whole("seed", seed, 0)
    similar, keep = share("similar", similar), share("keep", keep)
    check_gpus(gpus, workers)
    check_data(os.fspath(data))
    from eagleray.curation import cluster as clustering

    return clustering.cluster(
        absolute(str(features).rstrip("/")),
        absolute(str(data)),
        absolute(str(out).rstrip("/")) if out else None,
        clusters=clusters,
        similar=similar,
        bits=bits,
        keep=keep,
        seed=seed,
        workers=workers,
        gpus=gpus,
        note=say,
    ).folder
