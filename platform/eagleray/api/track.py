"""Send what MLflow lacks of a run."""

import os
from pathlib import Path

from eagleray import config
from eagleray.api.run import Run
from eagleray.base.errors import UserError
from eagleray.reports.read import read
from eagleray.reports.write import ENDED
from eagleray.runs import layout
from eagleray.runs.mlflow_run import send_missing
from eagleray.runs.run_store import run_store
from eagleray.runs.tracking import tracking_of


def track(run: str | os.PathLike[str]) -> str:
    """Send what MLflow lacks of a run that has ended or was stopped, such as after an outage, and return in one line
    what that was: numbers of steps, parameters, data sets, files, the model and the status.

    `run` is a `Run`, a folder or an s3:// URL. The server is that of `MLFLOW_TRACKING_URI`, or the database beside the
    run. A second call sends nothing. Raises UserError for a run that is training, which sends by itself, and for a
    server that refuses, and Outage when it does not answer.

    Example:

        print(eagleray.track("runs/a"))
    """
    found = read(os.fspath(run))
    if found.state not in ("finished", *ENDED):
        raise UserError(f"{found.out}: the run is {found.state}; expected one that has ended or was stopped")
    opened = Run(found.out)
    params = config.flatten(opened.recipe)
    tracking = tracking_of(opened.folder, Path(found.out).name)
    line = send_missing(opened.folder, tracking, params, ENDED.get(found.state, "FINISHED"))
    run_store(found.out).share(opened.folder / layout.MLFLOW)
    return line
