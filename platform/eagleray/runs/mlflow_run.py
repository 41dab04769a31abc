"""A run on an MLflow server: found or created there, with its parameters, numbers and files."""

import contextlib
import getpass
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagleray.base.errors import UserError, one_line
from eagleray.runs.mlflow_client import name
from eagleray.runs.mlflow_db import make_database
from eagleray.runs.mlflow_model import Backbone, log_model
from eagleray.runs.tracking import DataInput, Tracking, read_note, write_note
from eagleray.storage.error_classes import Kind, kind_of

log = logging.getLogger(__name__)
KIND = {"mlflow.experimentKind": "custom_model_development"}  # MLflow's pages show it as training, not as chats
Job = tuple[int, Mapping[str, Any]]  # when, in milliseconds, and a record


class MLflowRun:
    """A run on an MLflow server, which is created or found again. Any call may fail while the server is away, and
    may be repeated after `open`."""

    def __init__(
        self,
        tracking: Tracking,
        note: Path | None,
        name: str,
        params: Mapping[str, Any],
        inputs: Sequence[DataInput] = (),
    ) -> None:
        """`note` is a file that stores the run's id, so that restarts do not create a second run on the same server.
        `inputs` are the data sets that the run reads."""
        self.tracking, self.note, self.name, self.params, self.inputs = tracking, note, name, params, inputs
        self.latest: dict[str, int] = {}  # last step of every metric at the server
        self.values: dict[str, float] = {}
        self.answered = 0.0  # when, on the monotonic clock
        self.storing = False  # whether a file is being sent
        self.client: Any = None
        self.id = ""

    def open(self) -> None:
        """Find or create the run, and send the parameters and data sets that it lacks."""
        from mlflow.entities import Param

        data = self.find()
        lacking = [Param(k, str(v)[:6000]) for k, v in self.params.items() if k not in data.params]
        for i in range(0, len(lacking), 100):
            self.client.log_batch(self.id, params=lacking[i : i + 100])
        if self.inputs:
            self.client.log_inputs(self.id, [entity(d) for d in self.inputs])  # once each, however often it is called
        self.client.update_run(self.id, status="RUNNING")
        self.answered = time.monotonic()

    def connect(self) -> None:
        """Make a client of the server."""
        logging.getLogger("alembic").setLevel(logging.ERROR)
        from mlflow import MlflowClient

        make_database(self.tracking.uri)
        self.client = MlflowClient(self.tracking.uri)

    def find(self) -> Any:
        """Return the data of the run on the server. A run with a `note` file is created if there is none."""
        self.connect()
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

    def end(self, status: str, files: Sequence[Path], backbone: Backbone | None = None) -> None:
        """End the run with a status, and send its files, and its backbone as a model."""
        self.client.set_terminated(self.id, status)
        for path in files:
            self.store(path)
        registered = self._store_model(backbone) if backbone else ""
        if self.note:
            self._write_note({"run_id": self.id, "ended": status, "registered": registered})

    def _store_model(self, backbone: Backbone) -> str:
        """Store the backbone as a model, and return the name that it is registered under. What waiting cannot mend,
        such as a server that knows no models, is a warning."""
        self.storing = True
        try:
            log_model(self.client, self.id, backbone)
        except Exception as e:
            status = e.get_http_status_code() if hasattr(e, "get_http_status_code") else 503
            if not isinstance(e, UserError) and kind_of(status) is not Kind.LASTING:
                raise
            log.warning("the backbone was not stored as a model of MLflow: %s", one_line(e))
        finally:
            self.storing = False
        self.answered = time.monotonic()
        return backbone.register or ""

    def store(self, path: Path) -> None:
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
            there = self.with_key(key)
            return there.info.run_id if there else None
        return None

    def with_key(self, key: str) -> Any:
        """Return the run that was created with a key, or None."""
        there = self.client.search_runs([self._experiment()], f"tags.`eagleray.key` = '{key}'")
        return there[0] if there else None

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
        write_note(self.note, self.tracking.uri, fields)

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


def entity(data: DataInput) -> Any:
    """Return a data set as MLflow's client takes it."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    dataset = Dataset(data.name, data.digest, data.kind, data.source, profile=data.profile)
    return DatasetInput(dataset, [InputTag("mlflow.data.context", data.context)])
