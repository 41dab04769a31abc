"""Send MLflow the data about a run that MLflow lacks."""

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
    """Send MLflow the missing data about a run that has ended or was stopped, for example after an outage. Returns one
    line that says what was sent: the numbers of steps, parameters, data sets and files, the model and the status.

    `run` is a `Run`, a folder or an s3:// URL. The data go to the server of `MLFLOW_TRACKING_URI` or, without this
    variable, into the database beside the run. A second call sends nothing new. Raises UserError if the server refuses
    the data, or if the run is still training and sends its data by itself. Raises Outage if the server does not answer.

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
