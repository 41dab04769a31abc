"""Send a run's history to MLflow, if it is installed. Training never waits for it.

Records that a server did not receive while it was away are sent when it is back."""

import contextlib
import getpass
import json
import logging
import os
import queue
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagleray.base.errors import Outage, UserError, hide_secrets, one_line
from eagleray.base.files import read_history, write_atomic
from eagleray.runs import layout
from eagleray.runs.mlflow_client import configure, name
from eagleray.runs.mlflow_db import make_database
from eagleray.runs.system_metrics import Machine
from eagleray.storage.error_classes import Kind, kind_of
from eagleray.storage.retry import Transient, call_with_retries

log = logging.getLogger(__name__)
BUFFER = 10_000  # records in memory while MLflow is away; metrics.jsonl has the older ones
GATHER = 1.0  # seconds of records that go into one request
PAUSE = 20.0  # seconds between two attempts, at most
PATIENCE = 60.0  # seconds without an answer for which the end of a finished run waits
BRIEF = 5.0  # and that of one that was stopped, and is to be continued
LONGEST = 600.0  # and with answers, as files are sent
REPLY = 10  # seconds that a server may take for one answer
STORED = 120  # and for one file, which it may have to hand on to a store
LOAD = 30.0  # seconds between two measurements of the machine's load
RESULTS = (layout.RECIPE, layout.SUMMARY, "export", layout.HEALTH_PLOT)  # what MLflow gets of a finished run
KIND = {"mlflow.experimentKind": "custom_model_development"}  # MLflow's pages show it as training, not as chats
LOGIN = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
DATABASES = ("sqlite:", "postgresql", "mysql", "mssql")
Job = tuple[int, Mapping[str, Any]]  # when, in milliseconds, and a record


@dataclass(frozen=True)
class Tracking:
    """The MLflow server that a run's history is sent to, and the name of the run there."""

    uri: str = field(repr=False)  # may hold a password
    parent: str | None = None  # id of the run that this one is shown under
    name: str | None = None  # of the run; the name of its folder by default
    key: str | None = None  # by which the run is found where its note file is lost; a random one by default
    experiment: str = "eagleray"
    tags: Mapping[str, str] = field(default_factory=dict)

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.tags) | ({"mlflow.parentRunId": self.parent} if self.parent else {})


class MLflow:
    """One run in MLflow, which continues over restarts. A thread sends the records."""

    def __init__(self, out: Path, tracking: Tracking, params: Mapping[str, Any]) -> None:
        self.out, self.uri = out, tracking.uri
        self.run = MLflowRun(tracking, out / layout.MLFLOW, tracking.name or out.name, params)
        self.queue: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self.records: deque[Job] = deque(maxlen=BUFFER)  # not yet sent
        self.file = True  # whether metrics.jsonl may have lines that are neither sent nor in memory
        self.began = now()  # the time of such lines, the same in every attempt: MLflow keeps what differs twice
        self.machine, self.load_time = Machine(out), time.monotonic()
        self.loads: deque[Job] = deque(maxlen=1000)
        self.step = 0
        self.end: tuple[str, Sequence[Path]] | None = None
        self.ending, self.given_up = threading.Event(), threading.Event()
        configure(REPLY)
        with contextlib.suppress(ImportError):
            import mlflow  # noqa: F401  # not in the thread: a loader process forked meanwhile would inherit its locks
        self.thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self.thread.start()

    def log(self, record: Mapping[str, Any]) -> None:
        """Queue a record to be sent. Returns at once, whatever the server does."""
        self.queue.put((now(), dict(record)))

    def close(self, status: str, files: Sequence[Path]) -> None:
        """Send the remaining records and the files, and end the run with a `status` of MLflow. If the server is
        away, this waits for a minute, or for seconds when the run is not finished, then warns about what was not
        sent."""
        patience = PATIENCE if status == "FINISHED" else BRIEF
        configure(STORED)
        self.end = status, files
        self.ending.set()
        began = time.monotonic()
        while self.thread.is_alive() and time.monotonic() - began < LONGEST:
            if not self.run.storing and time.monotonic() - max(began, self.run.answered) > patience:
                break
            self.thread.join(timeout=0.1)
        if self.thread.is_alive():
            self.given_up.set()
            log.warning(
                "MLflow at %s does not answer; it lacks the steps after %d%s; the same command sends the rest",
                hide_secrets(self.uri),
                self.run.latest.get("loss", 0),
                f", and {', '.join(f.name for f in files)}" if files else "",
            )

    def _work(self) -> None:
        """Connect and send until the end; after an error, try again later."""
        pause, away = 0.5, False
        while not self.given_up.is_set():
            try:
                self.run.open()
                if away:
                    log.info("MLflow at %s answers again", hide_secrets(self.uri))
                pause, away = 0.5, False
                return self._serve()
            except ImportError:
                return log.warning("mlflow is not installed: metrics go to metrics.jsonl alone")
            except Exception as e:
                place, why = hide_secrets(self.uri), one_line(e)
                if not self.uri.startswith(("http:", "https:", *DATABASES)):
                    return log.warning("MLflow at %s cannot be used, metrics go to metrics.jsonl alone: %s", place, why)
                if not away:
                    log.warning("MLflow at %s: %s; records are sent when it answers again", place, why)
                away = True
            self._take(pause)
            pause = min(2 * pause, 5 if self.end else PAUSE)

    def _serve(self) -> None:
        """Send all records until the end. When the client raises an error, the records are not counted as sent."""
        while not self.given_up.is_set():
            if self.file:
                first = self.records[0][1]["step"] if self.records else float("inf")
                self.run.send([(self.began, r) for r in read_history(self.out / layout.METRICS) if r["step"] < first])
                self.file = False
            self.run.send([*self.records, *self.loads])
            self.records.clear()
            self.loads.clear()
            if self.end and self.queue.empty():
                return self.run.end(*self.end)
            self._take(GATHER)

    def _take(self, seconds: float) -> None:
        """Wait, except at the end of the run, then move queued records to those to be sent. Measure the machine
        every LOOK seconds."""
        (self.given_up if self.end else self.ending).wait(seconds)
        while not self.queue.empty():
            self.file = self.file or len(self.records) == self.records.maxlen
            self.records.append(self.queue.get())
            self.step = self.records[-1][1]["step"]
        if time.monotonic() - self.load_time > LOAD:
            self.load_time = time.monotonic()
            self.loads.append((now(), {"step": self.step} | self.machine.look()))


class MLflowRun:
    """A run on an MLflow server, which is created or found again. Any call may fail while the server is away, and
    may be repeated after `open`."""

    def __init__(self, tracking: Tracking, note: Path | None, name: str, params: Mapping[str, Any]) -> None:
        """`note` is a file that stores the run's id, so that restarts do not create a second run on the same server."""
        self.tracking, self.note, self.name, self.params = tracking, note, name, params
        self.latest: dict[str, int] = {}  # last step of every metric at the server
        self.values: dict[str, float] = {}
        self.answered = 0.0  # when, on the monotonic clock
        self.storing = False  # whether a file is being sent
        self.client: Any = None
        self.id = ""

    def open(self) -> None:
        """Find or create the run, and send the parameters that it lacks."""
        from mlflow.entities import Param

        data = self.find()
        lacking = [Param(k, str(v)[:6000]) for k, v in self.params.items() if k not in data.params]
        for i in range(0, len(lacking), 100):
            self.client.log_batch(self.id, params=lacking[i : i + 100])
        self.client.update_run(self.id, status="RUNNING")
        self.answered = time.monotonic()

    def find(self) -> Any:
        """Return the data of the run on the server. A run with a `note` file is created if there is none."""
        logging.getLogger("alembic").setLevel(logging.ERROR)
        from mlflow import MlflowClient

        make_database(self.tracking.uri)
        self.client = MlflowClient(self.tracking.uri)
        if self.note:
            self.id = self._existing_id() or self._create()
            self._write_note({"run_id": self.id})
        data = self.client.get_run(self.id).data
        self.latest = {m.key: m.step for m in data._metric_objs}  # the public way is to fetch the whole history
        self.values = data.metrics
        return data

    def send(self, jobs: Sequence[Job]) -> None:
        """Send the numbers of records. A metric is sent once per step: steps that a restart repeats are not sent
        again."""
        from mlflow.entities import Metric

        metrics = [
            Metric(name(k), float(v), when, record["step"])
            for when, record in jobs
            for k, v in record.items()
            if k != "step"
            and isinstance(v, int | float)
            and (k.startswith("system/") or record["step"] > self.latest.get(name(k), -1))
        ]
        for i in range(0, len(metrics), 1000):  # as many as one request may hold; it is stored whole or not at all
            self.client.log_batch(self.id, metrics[i : i + 1000])
            self.latest |= {m.key: m.step for m in metrics[i : i + 1000]}
            self.answered = time.monotonic()

    def end(self, status: str, files: Sequence[Path]) -> None:
        """End the run with a status, and send its files."""
        self.client.set_terminated(self.id, status)
        for path in files:
            self._store(path)
        if self.note:
            self._write_note({"run_id": self.id, "ended": status})

    def _store(self, path: Path) -> None:
        """Send a file, or a folder with its content. Does nothing when it is missing."""
        self.storing = True
        try:
            if path.is_dir():
                self.client.log_artifacts(self.id, str(path), path.name)
            elif path.exists():
                self.client.log_artifact(self.id, str(path))
            self.answered = time.monotonic()
        finally:
            self.storing = False

    def _existing_id(self) -> str | None:
        """Return the id of the run that an earlier process created, or None. The run is found even when that process
        ended before it could store the id."""
        from mlflow.exceptions import MlflowException

        note = self._read_note()
        if "run_id" in note:
            try:
                run = self.client.get_run(note["run_id"])
            except MlflowException as e:
                # Something else than MLflow, as a proxy before it, may not know the page, but does not name the run.
                if e.error_code != "RESOURCE_DOES_NOT_EXIST" or note["run_id"] not in str(e):
                    raise
            else:
                if run.info.lifecycle_stage == "active":
                    return note["run_id"]  # type: ignore[no-any-return]
            log.warning("MLflow run %s no longer exists; a new one is created", note["run_id"])
            self._write_note({})
        elif key := note.get("key") or self.tracking.key:
            there = self.client.search_runs([self._experiment()], f"tags.`eagleray.key` = '{key}'")
            return there[0].info.run_id if there else None
        return None

    def _create(self) -> str:
        """Create the run, with a key by which it can be found, and return its id."""
        experiment = self._experiment()
        key = self._read_note().get("key") or self.tracking.key or uuid.uuid4().hex
        self._write_note({"key": key})
        by = {"mlflow.source.name": "eagleray", "mlflow.source.type": "LOCAL"}
        with contextlib.suppress(OSError, KeyError):  # a container may give its user no name
            by["mlflow.user"] = getpass.getuser()
        tags = by | self.tracking.labels | {"eagleray.key": key}
        return self.client.create_run(experiment, run_name=self.name, tags=tags).info.run_id  # type: ignore[no-any-return]

    def _read_note(self) -> dict[str, str]:
        assert self.note is not None
        return read_note(self.note, self.tracking.uri)

    def _write_note(self, fields: Mapping[str, str]) -> None:
        assert self.note is not None
        write_atomic(self.note, json.dumps({"uri": hide_secrets(self.tracking.uri), **fields}))

    def _experiment(self) -> str:
        """Return the id of the experiment, which is created if it is missing. With an SQLite file its artifacts lie
        beside that file, not in the working folder."""
        client, title, uri = self.client, self.tracking.experiment, self.tracking.uri
        if existing := client.get_experiment_by_name(title):
            return existing.experiment_id  # type: ignore[no-any-return]
        own = uri.removeprefix("sqlite:///")
        place = None if own == uri else (Path(own).absolute().parent / "mlflow-artifacts").as_uri()
        try:
            return client.create_experiment(title, artifact_location=place, tags=KIND)  # type: ignore[no-any-return]
        except Exception:
            existing = client.get_experiment_by_name(title)  # two runs begin at once
            if existing is None:
                raise
            return existing.experiment_id  # type: ignore[no-any-return]


def read_note(note: Path, uri: str) -> dict[str, str]:
    """Return what the note file says about the run on this server; nothing when the run is on another server."""
    fields = json.loads(note.read_text()) if note.exists() else {}
    return fields if hide_secrets(fields.get("uri", "")) == hide_secrets(uri) else {}


def send_missing(out: Path, tracking: Tracking, params: Mapping[str, Any]) -> None:
    """Send what MLflow lacks of a finished run. Does not contact the server when everything was sent before, or when
    the run is tracked on another server."""
    note = out / layout.MLFLOW
    fields = read_note(note, tracking.uri)
    if fields.get("ended") == "FINISHED" or (note.exists() and not fields):
        return
    summary = json.loads((out / layout.SUMMARY).read_text())
    history = MLflow(out, tracking, params)
    history.log({"step": summary["steps"] + 1} | summary)
    history.close("FINISHED", [out / f for f in RESULTS])


def reserve(tracking: Tracking, note: Path) -> None:
    """Write the key of a run that does not exist yet into its note file, so that the file can be stored before."""
    if not read_note(note, tracking.uri):
        write_atomic(note, json.dumps({"uri": hide_secrets(tracking.uri), "key": uuid.uuid4().hex}))


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
            run.client.log_artifact(run.id, str(path))
    except ImportError:
        return "mlflow is not installed"
    except Exception as e:  # of the client, of the network, of the server
        return f"{hide_secrets(tracking.uri)}: {one_line(e)}"
    return ""


def patiently(tracking: Tracking, call: Callable[[], None], *, first: bool = False) -> None:
    """Call the function until it succeeds. Raises Outage after a minute, and UserError when the server refuses us and
    this is the first time that it is asked."""

    def attempt() -> None:
        try:
            call()
        except Exception as e:  # of the client, of the network, of the server
            status = e.get_http_status_code() if hasattr(e, "get_http_status_code") else 0
            if first and kind_of(status) in (Kind.RENEW, Kind.DENIED):
                raise UserError(f"MLflow at {hide_secrets(tracking.uri)}: {one_line(e)}; {LOGIN}") from None
            raise Transient(one_line(e)) from None

    try:
        call_with_retries(f"MLflow at {hide_secrets(tracking.uri)}", attempt, patience=PATIENCE)
    except Outage as e:
        raise Outage(f"{e}; run the same command again to send the rest") from None


def now() -> int:
    """Return the time in milliseconds since 1970."""
    return int(time.time() * 1000)


def tracking_of(folder: Path, name: str | None = None) -> Tracking:
    """Return where a run's history is sent: to MLFLOW_TRACKING_URI, or else to an SQLite file beside its folder, which
    all runs there share. Raises UserError for a path that the address of such a file cannot have."""
    if not os.environ.get("MLFLOW_TRACKING_URI") and "?" in str(folder.parent):
        raise UserError(
            f"{folder}: MLflow's address of a database in {folder.parent} would end at its question mark; expected a "
            "folder without one, or the variable MLFLOW_TRACKING_URI"
        )
    return Tracking(os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.parent / 'mlflow.db'}", name=name)
