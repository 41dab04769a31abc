"""Curate a data set in one call: measure, embed and cluster it, and write what a run should read of it."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from eagleray.api.data import measure
from eagleray.api.embed import embed, find_clusters
from eagleray.api.run import Run
from eagleray.base import files
from eagleray.base.console import say
from eagleray.base.errors import reworded
from eagleray.config import plugins as loading
from eagleray.config import yaml_text
from eagleray.data.index import open_shown
from eagleray.evaluation.given import check_backbone, check_data, check_gpus
from eagleray.storage.store import absolute

# Near copies: least similarity of features, below its default as hashes are compared too, and most differing bits.
SIMILAR, BITS = 0.9, 12
NAME = "curate"  # name of both files, without extension


def curate(
    data: str | Path,
    backbone: str | Path | Run,
    out: str | Path,
    *,
    workers: int = 0,
    gpus: bool = False,
    plugins: Sequence[str | Path] = (),
) -> dict[str, int | str]:
    """Measure, embed and cluster a data set, and write `curate.yaml`, a recipe's `data.train` that leaves out near
    copies, outliers and damaged, dark, blurred or tiny images, and `curate.html`, a page that shows them. After an
    interruption, repeat the call to continue.

    `data` is a folder, a pattern or an s3:// URL of shards, or a folder of images; features and columns go beside it,
    and those that are there already are not computed again. `backbone` is the same as for `embed`. `out` is the folder
    for the two files. `workers` is the number of parallel Ray processes; 0 runs all work in this process. `gpus=True`
    gives each process a GPU. `plugins` lists files and modules to load.

    Returns the numbers of all `images`, of those that each cut leaves out, of those `left`, and of the readings in an
    epoch (`balance`), and the paths of the two files (`recipe`, `page`). Raises UserError and Outage.

    Example:

        numbers = eagleray.curate("shards/", "runs/a", "curated/")
        numbers["left"], numbers["near copies"]
    """
    url, folder = absolute(str(data)), Path(out)
    files.check_local("out", folder)
    loading.use(plugins)
    check_gpus(gpus, workers)
    check_backbone(os.fspath(backbone))
    check_data(url)
    from eagleray.reports.page import check_page

    check_page("out: ", folder / f"{NAME}.html", url)
    with reworded(("out=FOLDER names another place", "delete it to begin again"), ("out: missing", f"data={url}")):
        measure(url, workers=workers)
        features = embed(backbone, url, workers=workers, gpus=gpus, plugins=plugins)
        clusters = find_clusters(features, url, similar=SIMILAR, bits=BITS, workers=workers, gpus=gpus)
    from eagleray.curation.cuts import column, find_cuts
    from eagleray.data.sample_table import SampleTable, read_about
    from eagleray.evaluation.embeddings import open_embedding
    from eagleray.reports.data_map import data_map, left_out

    index = open_shown(url, note=say)
    about = read_about(clusters)
    assert about is not None
    table = SampleTable(clusters, about)
    with reworded(("name the one that counts as columns, such as", "delete one of these tables, such as")):
        cuts = list(find_cuts(index, url, table))
    for cut in cuts:
        say(cut.line())
    left = ~np.any([cut.out for cut in cuts if cut.made], axis=0)
    train = {"url": url, "where": " and ".join(cut.where for cut in cuts if cut.made), "weight": "balance"}
    lines = [f"# {cut.line()}\n" for cut in cuts]
    recipe, page = folder / f"{NAME}.yaml", folder / f"{NAME}.html"
    with files.writing(str(recipe)):
        folder.mkdir(parents=True, exist_ok=True)
        files.write_atomic(recipe, "".join(lines) + yaml_text.dump({"data": {"train": train}}, width=1000))
    features_of = open_embedding(features, index)
    first = [left_out(index, cuts)]
    data_map(url, index, page, features=features_of, where=train["where"], columns="", first=first)
    counts = {cut.name: int(cut.out.sum()) if cut.made else 0 for cut in cuts}
    readings = int(column(table, "balance")[left].sum())
    numbers = {"images": len(index), **counts, "left": int(left.sum()), "balance": readings}
    return {**numbers, "recipe": str(recipe), "page": str(page)}
