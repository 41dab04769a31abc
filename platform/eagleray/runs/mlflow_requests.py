"""Ask an MLflow server for one thing, on behalf of a command: a parent run, the rest of a history, numbers of an
evaluation."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eagleray.base.errors import Outage, UserError, hide_secrets, one_line
from eagleray.runs import layout, mlflow_thread
from eagleray.runs.mlflow_client import REPLY, STORED, configure, name, now
from eagleray.runs.mlflow_model import known_model, register
from eagleray.runs.mlflow_run import MLflowRun
from eagleray.runs.summary import read_summary
from eagleray.runs.tracking import DataInput, Tracking, read_note, write_note
from eagleray.storage.error_classes import Kind, kind_of
from eagleray.storage.retry import Transient, call_with_retries

LOGIN = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"


def send_missing(out: Path, tracking: Tracking, params: Mapping[str, Any], inputs: Sequence[DataInput] = ()) -> None:
    """Send what MLflow lacks of a finished run. Does not contact the server when everything was sent before, or when
    the run is tracked on another server."""
    note = out / layout.MLFLOW
    fields = read_note(note, tracking.uri)
    wanted = params.get("track.register")
    registered = not wanted or fields.get("registered") == wanted
    if (fields.get("ended") == "FINISHED" and registered) or (note.exists() and not fields):
        return
    summary = read_summary(out)
    history = mlflow_thread.MLflow(out, tracking, params, inputs)
    history.log({"step": summary["steps"] + 1} | summary)
    history.close("FINISHED", [out / f for f in mlflow_thread.RESULTS])


def parent_run(tracking: Tracking, note: Path, name: str, params: Mapping[str, Any]) -> str:
    """Return the id of the run under which MLflow shows other runs. It is created once; its id is then read from the
    file `note`. Raises Outage when the server stays away, and UserError when it refuses us."""
    configure(REPLY)
    run = MLflowRun(tracking, note, name, params)
    patiently(tracking, run.open, first=True)
    return run.id


def finish(tracking: Tracking, run_id: str, status: str, metrics: Mapping[str, float], files: Sequence[Path]) -> None:
    """End a run that `parent_run` created, and send its results. A second call changes nothing. Raises Outage."""
    configure(STORED)
    run = MLflowRun(tracking, None, "", {})
    run.id = run_id

    def send() -> None:
        run.open()
        step = max(run.latest.values(), default=-1) + 1
        run.send([(now(), {"step": step} | {k: v for k, v in metrics.items() if run.values.get(name(k)) != v})])
        run.end(status, files)

    patiently(tracking, send)


def append(tracking: Tracking, note: Path, metrics: Mapping[str, float], files: Sequence[Path]) -> str:
    """Add numbers and files to the run of a note file, without changing its status. Returns the reason as text when
    that fails, else an empty text. The server is asked once, without retries."""
    fields = read_note(note, tracking.uri)
    if "run_id" not in fields:
        return f"the run was not tracked at {hide_secrets(tracking.uri)}"
    configure(REPLY)
    run = MLflowRun(tracking, None, "", {})
    run.id = fields["run_id"]
    try:
        run.find()
        step = max((run.latest.get(name(k), -1) for k in metrics), default=-1) + 1
        run.send([(now(), {"step": step} | dict(metrics))])
        for path in files:
            run.store(path)
    except ImportError:
        return "mlflow is not installed"
    except Exception as e:  # of the client, of the network, of the server
        return f"{hide_secrets(tracking.uri)}: {one_line(e)}"
    return ""


def mend(tracking: Tracking, note: Path, status: str) -> bool:
    """Give the run of a note file the status with which it ended, where it did not live to do so itself: MLflow would
    show it as running for ever. Returns whether the file has changed. The server is asked once; if it does not answer,
    the run is mended when it is seen again."""
    fields = read_note(note, tracking.uri)
    if "run_id" not in fields or "ended" in fields:
        return False
    configure(REPLY)
    run = MLflowRun(tracking, None, "", {})
    run.id = fields["run_id"]
    try:
        run.connect()
        there = run.client.get_run(run.id).info.status
        if there == "RUNNING":
            run.client.set_terminated(run.id, status)
        write_note(note, tracking.uri, fields | {"ended": status if there == "RUNNING" else there})
    except Exception:  # of the client, of the network, of the server, of a folder that cannot be written
        return False
    return True


def register_run(tracking: Tracking, key: str, model: str) -> str:
    """Register the model that the run with this key has stored as a version of `model`, and return the version. Raises
    UserError when there is no such model, and Outage."""
    configure(STORED)
    run = MLflowRun(tracking, None, "", {})
    version = ""

    def attempt() -> None:
        nonlocal version
        run.connect()
        there = run.with_key(key)
        logged = known_model(run.client, there) if there else None
        if logged is None:
            raise UserError(f"its run has no model at {hide_secrets(tracking.uri)}")
        version = register(run.client, logged, model, there.data.metrics)

    patiently(tracking, attempt)
    return version


def patiently(tracking: Tracking, call: Callable[[], None], *, first: bool = False) -> None:
    """Call the function until it succeeds. Raises Outage after a minute, and UserError when the server refuses us and
    this is the first time that it is asked."""

    def attempt() -> None:
        try:
            call()
        except UserError:
            raise
        except Exception as e:  # of the client, of the network, of the server
            status = e.get_http_status_code() if hasattr(e, "get_http_status_code") else 0
            if first and kind_of(status) in (Kind.RENEW, Kind.DENIED):
                raise UserError(f"MLflow at {hide_secrets(tracking.uri)}: {one_line(e)}; {LOGIN}") from None
            raise Transient(one_line(e)) from None

    try:
        call_with_retries(f"MLflow at {hide_secrets(tracking.uri)}", attempt, patience=mlflow_thread.PATIENCE)
    except Outage as e:
        raise Outage(f"{e}; run the same command again to send the rest") from None
