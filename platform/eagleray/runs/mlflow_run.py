"""Keep a run on an MLflow server: found or created there, with its parameters, numbers, files and model.

MLflow's client is imported late, as a run can do without it. All that can be sent is in the run's folder, so nothing
else is kept during an outage: `send_missing` reads the folder."""

import contextlib
import json
import logging
import os
import re
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eagleray.base.errors import Outage, UserError, hide_secrets, one_line
from eagleray.base.files import read_history
from eagleray.runs import layout
from eagleray.runs.summary import HEALTH, VERDICT, finished
from eagleray.runs.tracking import CREATED, DataInput, Tracking, read_note, reserve, write_note
from eagleray.storage.error_classes import Kind, kind_of

log = logging.getLogger(__name__)
EXPERIMENT = "eagleray"
KIND = {"mlflow.experimentKind": "custom_model_development"}  # MLflow's pages show it as training, not as chats
RESULTS = (
    layout.RECIPE,
    layout.SUMMARY,
    layout.HEALTH,
    layout.HEALTH_PLOT,
    layout.NEIGHBOURS,
    layout.PLACES,
)  # the files that a run sends when it ends
LATER = (layout.RESULTS, "report.html", "report")  # files that other commands send
REPLY = 5  # seconds that a server may take for one answer
STORED = 120  # seconds that a server may take for a file, which it may have to hand on to a store
RETRIES = 4  # retries while no training waits; the client pauses for half a minute in all
LONGEST_TAG = 5000  # longest tag in characters
MOST = 1000  # most numbers in a request, which a server stores as a whole or not at all
LOGIN = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"


def configure(timeout: int, retries: int = 0) -> None:
    """Set the timeout of MLflow's client in seconds, and how often it repeats a request."""
    os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = str(retries)
    os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = str(timeout)
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "ERROR")  # MLflow's lines about tables and migrations help no user
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    os.environ.setdefault("MLFLOW_UV_AUTO_DETECT", "false")  # no model needs the uv project of the working folder
    logging.getLogger("alembic").setLevel(logging.ERROR)
    logging.getLogger("mlflow.utils.async_logging").setLevel(logging.CRITICAL)  # failures are logged here, in one line


def told(uri: str, error: BaseException) -> UserError | Outage:
    """Return an error of MLflow's client as a UserError if a person has to change something, else as an Outage."""
    if isinstance(error, UserError | Outage):
        return error
    if isinstance(error, ImportError):
        return UserError("mlflow is not installed")
    status = error.get_http_status_code() if hasattr(error, "get_http_status_code") else 503
    line = f"MLflow at {hide_secrets(uri)}: {one_line(error).partition('. ')[0]}"
    if kind_of(status) is Kind.WAIT:
        return Outage(line)
    return UserError(f"{line}; {LOGIN if status in (401, 403) else 'is MLFLOW_TRACKING_URI right?'}")


@contextlib.contextmanager
def asking(uri: str) -> Iterator[None]:
    """A context that raises errors of MLflow's client as UserError or Outage."""
    try:
        yield
    except Exception as e:  # the client, the network and the server raise errors of different classes
        raise told(uri, e) from None


def connect(uri: str) -> Any:
    """Return a client of the server. A missing SQLite file is first made under another name, as a process that is
    killed half-way would leave a useless file, and two runs that begin at once would damage the same file."""
    from mlflow import MlflowClient

    path = Path(uri.removeprefix("sqlite:///"))
    if uri.startswith("sqlite:///") and not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as folder:
            made = Path(folder) / path.name
            MlflowClient(f"sqlite:///{made}").search_experiments(max_results=1)
            try:
                os.link(made, path)  # a link, unlike a move, never replaces the file of another process
            except FileExistsError:
                pass
            except OSError:  # a file system without links
                made.replace(path)
    return MlflowClient(uri)


def name(metric: str) -> str:
    """Return a metric's name with the characters and the length that MLflow allows."""
    return re.sub(r"[^\w./ :-]", "_", metric)[:250]


def now() -> int:
    """Return the time in milliseconds since 1970."""
    return int(time.time() * 1000)


def metrics_of(record: Mapping[str, Any], when: int) -> list[Any]:
    """Return the numbers of a record as MLflow's Metric objects. `when` is their time in milliseconds since 1970."""
    from mlflow.entities import Metric

    numbers = {k: v for k, v in record.items() if k != "step" and isinstance(v, int | float)}
    return [Metric(name(k), float(v), when, record["step"]) for k, v in numbers.items()]


def records_of(folder: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the records of a run's folder: the numbers of its start, of its steps and of its end."""
    if (start := folder / layout.START_SCORES).exists():
        yield {"step": 0} | json.loads(start.read_text())
    lines = read_history(folder / layout.METRICS)
    yield from lines
    if summary := finished(folder, lines[-1]["step"] if lines else 0):
        yield summary | {"step": summary["steps"] + 1}


class MLflowRun:
    """A run on an MLflow server. Calls raise UserError if a person has to change something, or else Outage."""

    def __init__(
        self,
        tracking: Tracking,
        note: Path,
        name: str = "",
        params: Mapping[str, Any] | None = None,
        inputs: Sequence[DataInput] = (),
    ) -> None:
        """`note` is a file that stores the run's id, so that restarts do not create a second run on the same server.
        `inputs` are the data sets that the run reads."""
        self.tracking, self.note, self.name, self.params, self.inputs = tracking, note, name, params or {}, inputs
        self.latest: dict[str, int] = {}  # last step of each metric that the server has
        self.sent = Counter[str]()  # counts of what was sent, by kind
        self.client: Any = None
        self.run: Any = None  # the server's answer when the run was opened
        self.id = ""

    @property
    def fields(self) -> dict[str, Any]:
        return read_note(self.note, self.tracking.uri)

    def write(self, **fields: Any) -> None:
        write_note(self.note, self.tracking.uri, self.fields | fields)

    def find(self) -> bool:
        """Find the run. Returns whether there is one. Raises UserError when it was deleted."""
        from mlflow.exceptions import MlflowException

        self.client = connect(self.tracking.uri)
        fields, self.run = self.fields, None
        if id := fields.get("run_id", ""):
            try:
                self.run = self.client.get_run(id)
            except MlflowException as e:
                # A proxy in front of MLflow may report a missing page too, but only MLflow's error names the run.
                if e.error_code != "RESOURCE_DOES_NOT_EXIST" or id not in str(e):
                    raise
                log.warning("MLflow has no run %s any more", id)
        elif key := fields.get("key"):
            self.run = self.with_key(key)
        if self.run:
            if self.run.info.lifecycle_stage != "active":
                self.experiment()  # raises for a deleted experiment, whose runs are deleted with it
                raise self.deleted("run", id, f"runs restore --run-id {id}")
            self.id = self.run.info.run_id
            # The private list has the last step of each metric; otherwise the whole history would have to be fetched.
            self.latest = {m.key: m.step for m in self.run.data._metric_objs}
        return self.run is not None

    def open(self, status: str = "RUNNING") -> None:
        """Find or create the run, and send the parameters and data sets that it lacks. An empty `status` is not set."""
        from mlflow.entities import Dataset, DatasetInput, InputTag, Param

        with asking(self.tracking.uri):
            reserve(self.tracking, self.note, self.name, self.inputs)
            if not self.find():
                self.create()
            known = {d.dataset.digest for d in (self.run.inputs.dataset_inputs if self.run.inputs else ())}
            lacking = [Param(k, str(v)[:6000]) for k, v in self.params.items() if k not in self.run.data.params]
            self.client.log_batch(self.id, params=lacking)
            data = [
                DatasetInput(
                    Dataset(d.name, d.digest, d.kind, d.source, profile=d.profile),
                    [InputTag("mlflow.data.context", d.context)],
                )
                for d in self.inputs
                if d.digest not in known
            ]
            if data:
                self.client.log_inputs(self.id, data)
            self.sent += Counter({"parameter": len(lacking), "data set": len(data)})
            if status:
                self.client.update_run(self.id, status=status)
            self.write(run_id=self.id)

    def create(self) -> None:
        """Create the run, with a key by which it is found if this process ends before it could store the id."""
        from mlflow.utils.git_utils import get_git_commit

        key = self.fields["key"]
        tags = {"mlflow.source.name": "eagleray", "mlflow.source.type": "LOCAL", "eagleray.key": key}
        if who := self.fields.get("user"):
            tags["mlflow.user"] = who
        if self.tracking.parent:
            tags["mlflow.parentRunId"] = self.tracking.parent
        if commit := get_git_commit(__file__):
            tags["mlflow.source.git.commit"] = commit
        self.run = self.client.create_run(self.experiment(), run_name=self.name, tags=tags)
        self.id, self.latest = self.run.info.run_id, {}
        write_note(self.note, self.tracking.uri, {k: v for k, v in self.fields.items() if k in CREATED})

    def with_key(self, key: str) -> Any:
        """Return the run that was created with a key, or None."""
        there = self.client.search_runs([self.experiment()], f"tags.`eagleray.key` = '{key}'")
        return there[0] if there else None

    def experiment(self) -> str:
        """Return the id of the experiment, which is created if it is missing. With an SQLite file its artifacts lie
        beside that file, not in the working folder. Raises UserError when it was deleted."""
        client, uri = self.client, self.tracking.uri
        existing = client.get_experiment_by_name(EXPERIMENT)
        if existing is None:
            own = uri.removeprefix("sqlite:///")
            place = None if own == uri else (Path(own).absolute().parent / "mlflow-artifacts").as_uri()
            try:
                return client.create_experiment(EXPERIMENT, artifact_location=place, tags=KIND)  # type: ignore[no-any-return]
            except Exception:
                existing = client.get_experiment_by_name(EXPERIMENT)  # another run may have created it
                if existing is None:
                    raise
        if existing.lifecycle_stage != "active":
            restore = f"experiments restore --experiment-id {existing.experiment_id}"
            raise self.deleted("experiment", EXPERIMENT, restore)
        return existing.experiment_id  # type: ignore[no-any-return]

    def deleted(self, what: str, name: str, restore: str) -> UserError:
        uri = hide_secrets(self.tracking.uri)
        command = f"MLFLOW_TRACKING_URI={uri} mlflow {restore}"
        return UserError(f"MLflow at {uri}: the {what} {name} was deleted there; `{command}` brings it back")

    def new(self, metrics: Iterable[Any]) -> list[Any]:
        """Return the metrics of steps after the last one that the server has, and all metrics of the machine's load.
        Thus metrics of steps that a restart takes again are left out."""
        system = "system/"
        return [m for m in metrics if m.key.startswith(system) or m.step > self.latest.get(m.key, -1)]

    def send(self, metrics: Sequence[Any]) -> None:
        """Send numbers, and wait until the server has them."""
        with asking(self.tracking.uri):
            self.client.log_batch(self.id, metrics)
        self.latest |= {m.key: m.step for m in metrics}
        self.sent["number"] += len(metrics)

    def fill(self, folder: Path, when: int) -> None:
        """Send each number in `folder` that the server lacks, even if it has later ones. `when` is their time."""
        metrics = [m for record in records_of(folder) for m in metrics_of(record, when)]
        with asking(self.tracking.uri):
            there = {k: {m.step for m in self.client.get_metric_history(self.id, k)} for k in {m.key for m in metrics}}
        self.send([m for m in metrics if m.step not in there[m.key]])

    def end(self, status: str, files: Iterable[Path], folder: Path | None = None) -> None:
        """Set the final `status` of the run, unless it is empty, and send its `files`. If the run's `folder` is given,
        also send its summary as tags and its export as a model."""
        with asking(self.tracking.uri):
            if status and self.client.get_run(self.id).info.status != status:
                self.client.set_terminated(self.id, status)
                self.sent[f"status {status}"] = 1
            if folder:
                self.tag(finished(folder) or {})
            configure(STORED)
            for path in files:
                self.store(path)
            if folder and (folder / layout.EXPORT / "backbone.json").exists():
                self.store_model(folder)
        if status:
            self.write(ended=status)

    def tag(self, summary: Mapping[str, Any]) -> None:
        """Store the verdict and the findings of a run's summary as tags, which MLflow shows and searches."""
        for key in (VERDICT, HEALTH):
            if key in summary:
                text = "; ".join(summary[key]) or "no findings"
                self.client.set_tag(self.id, f"eagleray.{key}", text[:LONGEST_TAG])

    def store(self, path: Path) -> None:
        """Send a file, or the files of a folder, as far as they are new or changed. Does nothing if it is missing."""
        known = dict(self.fields.get("files", {}))
        for file in sorted(path.rglob("*")) if path.is_dir() else [path] * path.exists():
            key = str(file.relative_to(path.parent))
            if file.is_file() and known.get(key) != (sum := zlib.crc32(file.read_bytes())):
                self.client.log_artifact(self.id, str(file), os.path.dirname(key) or None)
                known[key] = sum
                self.sent["file"] += 1
        self.write(files=known)

    def store_model(self, folder: Path) -> None:
        """Store the backbone in a run's folder as a model.
        An error that waiting cannot resolve, such as of a server without models, is logged as a warning."""
        from eagleray.runs.mlflow_model import Backbone, log_model

        size, resize = self.params.get("evaluate.size", 224), self.params.get("evaluate.resize", 256)
        register, data = self.params.get("track.register"), "".join(d.digest for d in self.inputs[-1:])
        try:
            self.sent["model"] += log_model(self.client, self.id, Backbone(folder, size, resize, data, register))
        except Exception as e:
            if isinstance(error := told(self.tracking.uri, e), Outage):
                raise
            log.warning("the backbone was not stored as a model of MLflow: %s", one_line(error))
        self.write(registered=register or "")


def send_missing(folder: Path, tracking: Tracking, params: Mapping[str, Any], status: str) -> str:
    """Send what MLflow lacks of a run that no process works on, and return in words what was sent. A missing run is
    created. It gets the `status`. Raises UserError when the server refuses, and Outage when it does not answer."""
    configure(REPLY, RETRIES)
    reserve(tracking, note := folder / layout.MLFLOW, tracking.name or folder.name)
    inputs = [DataInput(*d) for d in read_note(note, tracking.uri).get("inputs", ())]
    run = MLflowRun(tracking, note, tracking.name or folder.name, params, inputs)
    run.open(status="")
    run.fill(folder, now())
    run.end(status, [folder / f for f in (*RESULTS, *LATER)], folder if status == "FINISHED" else None)
    sent = [f"{n} {what}{'s' * (n > 1)}" if "status" not in what else what for what, n in run.sent.items() if n]
    return f"MLflow at {hide_secrets(tracking.uri)}, run {run.id}: {', '.join(sent) or 'nothing was missing'}"


def parent_run(tracking: Tracking, note: Path, name: str, params: Mapping[str, Any]) -> str:
    """Return the id of the run under which MLflow shows the runs of a sweep. It is created once, and its id is then
    read from the file `note`. Raises Outage when the server does not answer, and UserError when it refuses."""
    configure(REPLY, RETRIES)
    run = MLflowRun(tracking, note, name, params)
    run.open()
    return run.id


def update(
    tracking: Tracking, note: Path, metrics: Mapping[str, float], files: Iterable[Path] = (), status: str = ""
) -> None:
    """Add metrics and files to the run whose id is in the file `note`, and set its status if it is running. A second
    call changes nothing, and no request is retried. Raises UserError when the run is missing, Outage without answer."""
    configure(REPLY)
    run = MLflowRun(tracking, note)
    with asking(tracking.uri):
        if "run_id" not in run.fields or not run.find():
            raise UserError(f"the run was not tracked at {hide_secrets(tracking.uri)}")
        there, known = run.run.info.status, run.run.data.metrics
        step = max((run.latest.get(name(k), -1) for k in metrics), default=-1) + 1
        run.send(metrics_of({"step": step} | {k: v for k, v in metrics.items() if known.get(name(k)) != v}, now()))
        run.end(status and (status if there == "RUNNING" else there), files)


def mend(tracking: Tracking, note: Path, status: str) -> bool:
    """Give a run in MLflow its final `status`, if it was killed before it could do so, as MLflow would else show it as
    running for ever. `note` is the file with the run's id. Returns whether the status was sent: then `note` has
    changed. A failure is not raised, and the next call tries again."""
    fields = read_note(note, tracking.uri)
    if "run_id" not in fields or "ended" in fields:
        return False
    try:
        update(tracking, note, {}, status=status)
    except (UserError, Outage, OSError):  # the folder may be read-only
        return False
    return True


def register_run(tracking: Tracking, note: Path, model: str) -> str:
    """Register the model that the run in the file `note` has stored as a version of `model`, and return the version.
    Raises UserError when there is no such model, and Outage when the server does not answer."""
    from eagleray.runs.mlflow_model import known_model, register

    configure(STORED, RETRIES)
    run = MLflowRun(tracking, note)
    with asking(tracking.uri):
        logged = known_model(run.client, run.run) if run.find() else None
        if logged is None:
            raise UserError(f"its run has no model at {hide_secrets(tracking.uri)}")
        return register(run.client, logged, model, run.run.data.metrics)
