"""Run sweeps: many runs of one recipe with different values."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagleray.api.overrides import Overrides, overrides_of
from eagleray.base.errors import UserError
from eagleray.base.numbers_given import whole
from eagleray.sweeps.sweep import load


def tune(
    sweep: str | Path,
    overrides: Overrides | None = None,
    *,
    out: str | Path | None = None,
    plugins: Sequence[str | Path] = (),
    max_concurrent: int | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Search for the best settings of a recipe with trials on Ray, and return the results.

    `sweep` is a name from `eagleray list sweeps` or a YAML file. `overrides` sets recipe keys for all trials, and keys
    of the sweep itself as `sweep.KEY`. `out` is a folder that all machines share, or an s3:// URL. At most
    `max_concurrent` trials run in parallel, by default as many as fit on the cluster. `resume=True` continues an
    interrupted sweep. `plugins` lists files and modules to load for all trials, as in `pretrain`.

    Returns a dictionary: `out` is the folder with the table, the plots and the best recipe; `best` is the best trial or
    None; `trials` has a row for each trial; and `finished` is False if the sweep was interrupted. Raises UserError and
    Outage.

    Example:

        found = eagleray.tune(
            "sweep.yaml", {"data.train": "shards/", "data.test": "shards/", "sweep.trials": 1}, out="sweeps/a"
        )
        found["best"]["values"], found["finished"]
    """
    if importlib.util.find_spec("ray") is None:
        raise UserError("tune: needs the package ray, which is not installed")
    most = None if max_concurrent is None else whole("max_concurrent", max_concurrent, 1)
    chosen = load(str(sweep), overrides_of(overrides, out=out), [str(p) for p in plugins])
    from eagleray.sweeps import run

    return run.tune(chosen, most=most, resume=resume)
