"""Describe the data of a run for MLflow: a name, a digest of what was read, and where it lies."""

import json
from collections.abc import Sequence

import numpy as np

from eagleray.base.errors import hide_secrets
from eagleray.config.source import Source
from eagleray.data.index import Index
from eagleray.protocols.digests import digest
from eagleray.runs.plan import Plan
from eagleray.runs.tracking import DataInput
from eagleray.storage.store import folder_of


def data_inputs(plan: Plan) -> list[DataInput]:
    """Return the data sets of a run."""
    inputs = [data_input("training", plan.recipe.data.sources(), plan.index)]
    if plan.test and plan.recipe.data.test:
        inputs.append(data_input("test", plan.recipe.data.test, plan.test))
    return inputs


def data_input(context: str, sources: Sequence[Source], index: Index) -> DataInput:
    """Describe a data set. The folder that it lies in does not change its digest."""
    urls = [hide_secrets(s.url) for s in sources]
    name = ", ".join("/".join(url.rstrip("/").split("/")[-2:]) for url in urls)
    used = np.diff(index.first).tolist()
    shards = [(b.url.rpartition("/")[2], b.size, b.tag) for b in index.shards]
    profile = {"images": len(index), "shards": len(index.shards), "labelled": bool(index.labelled)}
    return DataInput(
        context,
        name[:500],  # MLflow keeps no more
        digest(shards, used, index.repeats.tolist()),
        "local" if folder_of(urls[0]) else urls[0].partition("://")[0],
        json.dumps({"uri": urls[0] if len(urls) == 1 else ",".join(urls)})[:65_000],
        json.dumps(profile),
    )
