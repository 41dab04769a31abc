"""Embed the samples of a data set, and cluster them by their features."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from eagleray.api.run import Run
from eagleray.base.console import say, say_loading
from eagleray.base.contexts import kept_generators
from eagleray.base.errors import UserError
from eagleray.base.numbers_given import share, whole
from eagleray.config import plugins as loading
from eagleray.evaluation.given import check_backbone, check_data, check_gpus
from eagleray.storage.store import absolute


@kept_generators()
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
    """Write the features of every sample of a data set to Parquet files, in the order of the index, and return the
    folder of these files. After an interruption, repeat the call to continue.

    `backbone` is a run, a checkpoint, an export, `timm:NAME`, or a file of tensors. For a file of tensors,
    `architecture` is the timm name of the network. `data` is a folder, a pattern or an s3:// URL of shards, or a folder
    of images. `out` is the folder or s3:// URL for the files, by default one in `embeddings/` beside the shards.
    `features` is the type of features: `pooled`, `last4` or `avgpool`. `embed` resizes the short side of each image to
    `resize` pixels, then crops the central square of `size` pixels. By default `resize` and `size` are those of the
    backbone's own evaluation. `workers` is the number of parallel Ray tasks; 0 runs all work in this process.
    `gpus=True` gives each task a GPU. `plugins` lists files and modules to load.

    Raises UserError if an argument is wrong, or if `out` has features of a different backbone or of different images.
    Raises Outage if a store does not answer.

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
    say_loading()
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
    """Find the clusters and the near copies in a data set from its features, and return the folder of the new columns.

    `features` is the folder that `embed` has written, and `data` is the data set that was embedded. `clusters` lists
    the number of clusters on each level, from the lowest up. By default the lowest level has one cluster per thousand
    samples, and each higher level has a tenth of the clusters of the level below. An image is a near copy of an image
    with a larger file if both are in the same cluster and their cosine similarity is at least `similar`. If `bits` is
    set, their perceptual hashes from `measure` also have to differ in at most `bits` of 63 bits. The column `balance`
    is a sampling weight that selects the share `keep` of the images, evenly from all clusters. `seed` is the random
    seed of the initial cluster centres. `workers` is the number of Ray processes that share the work; 0 runs all work
    in this process. `gpus=True` gives each process a GPU. `out` is the folder or s3:// URL for the columns. By default
    they go beside the shards, where `data.train.where` and `data.train.weight` find them.

    Raises UserError if an argument is wrong or if `features` are those of different images. Raises Outage if a store
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
    say_loading()
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
