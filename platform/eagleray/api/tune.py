"""Run sweeps: many runs of one recipe with different values."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagleray.api.overrides import Overrides, overrides_of
from eagleray.base.errors import UserError
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
    """Search the best settings of a recipe on Ray and return what was found.

    `sweep` is a name of `eagleray list sweeps` or a YAML file. `overrides` are recipe keys for all trials, and
    `sweep.KEY` for the sweep itself. At most `max_concurrent` trials run at once, by default as many as fit; `resume`
    continues a sweep that was ended. `plugins` are as in `pretrain`, for all trials.

    `out` is a folder that all machines share, or an s3:// URL.

    Returns `out`, the folder with table, plots and the best recipe; `best`, the best trial or None; `trials`, a row
    each; and `finished`, which is False when the sweep was interrupted. Raises UserError and Outage.

    Example:

        found = eagleray.tune(
            "sweep.yaml", {"data.train": "shards/", "data.test": "shards/", "sweep.trials": 1}, out="sweeps/a"
        )
        found["best"]["values"], found["finished"]
    """
    if importlib.util.find_spec("ray") is None:
        raise UserError("tune: needs the package ray, which is not installed")
    chosen = load(str(sweep), overrides_of(overrides, out=out), [str(p) for p in plugins])
    from eagleray.sweeps import run

    return run.tune(chosen, most=max_concurrent, resume=resume)
