"""A run's history: JSON lines always, and MLflow where it is installed. Training never waits for MLflow."""

import contextlib
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagleray import checkpoint
from eagleray.errors import UserError

log = logging.getLogger(__name__)


class JsonLines:
    """`metrics.jsonl`: one object per line, in order of steps, whatever happened in between."""

    def __init__(self, path: Path, *, step: int) -> None:
        """Continue a file from a step; lines of later steps, which will be taken again, are dropped."""
        lines = [r for r in read_lines(path) if r["step"] <= step]
        checkpoint.replace(path, "".join(json.dumps(r) + "\n" for r in lines))
        self._file = path.open("a")

    def log(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that may end in the middle of one."""
    if not path.exists():
        return []
    whole = path.read_text().rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


def tracking_uri(out: Path, uri: str | None) -> str:
    """Where MLflow keeps its data: the given address, else SQLite beside the run's folder, shared by the runs there."""
    return uri or f"sqlite:///{out.parent / 'mlflow.db'}"


class MLflow:
    """One MLflow run, continued over restarts, fed from a thread of its own."""

    def __init__(self, out: Path, uri: str, params: Mapping[str, Any]) -> None:
        self.out, self.uri, self.params = out, uri, params
        self.note = out / "mlflow.json"  # the run's id
        self.jobs: queue.Queue[Any] = queue.Queue()
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "ERROR")  # its tables and migrations are no news to anyone
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        with contextlib.suppress(ImportError):
            import mlflow  # noqa: F401  # not in the thread: a loader process forked meanwhile would inherit its locks
        self.thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self.thread.start()

    def log(self, record: Mapping[str, Any]) -> None:
        self.jobs.put(dict(record))

    def close(self, status: str, files: list[Path]) -> None:
        """Send what is left, with the run's files, and end the run. `status` as MLflow names it."""
        self.jobs.put((status, files))
        self.thread.join(timeout=120)
        if self.thread.is_alive():
            log.warning("MLflow at %s does not answer; metrics.jsonl has everything", self.uri)

    def _work(self) -> None:
        try:
            client, run, done = self._open()
        except ImportError:
            log.warning("mlflow is not installed: metrics go to metrics.jsonl alone")
            return
        except Exception as e:
            log.warning("MLflow at %s cannot be used, metrics go to metrics.jsonl alone: %s", self.uri, one_line(e))
            return
        from mlflow.entities import Metric

        while True:
            job = self.jobs.get()
            try:
                if isinstance(job, tuple):
                    return self._end(client, run, *job)
                if job["step"] > done:  # steps that a restart takes again are logged once
                    now = int(time.time() * 1000)
                    values = {k: v for k, v in job.items() if isinstance(v, int | float) and k != "step"}
                    client.log_batch(run, [Metric(k, float(v), now, job["step"]) for k, v in values.items()])
            except Exception as e:
                log.warning("MLflow at %s: %s", self.uri, one_line(e))
                if isinstance(job, tuple):  # nothing comes after the end
                    return

    def _open(self) -> tuple[Any, str, int]:
        """Client, run id and the last step that was logged."""
        logging.getLogger("alembic").setLevel(logging.ERROR)
        from mlflow import MlflowClient
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        client = MlflowClient(self.uri)
        known = json.loads(self.note.read_text()) if self.note.exists() else {}
        if known.get("uri") == self.uri:
            try:
                history = client.get_metric_history(known["run_id"], "loss")
                client.update_run(known["run_id"], status="RUNNING")
                return client, known["run_id"], max((m.step for m in history), default=0)
            except MlflowException:
                log.warning("MLflow run %s is gone; starting another", known["run_id"])
        run = client.create_run(self._experiment(client), run_name=self.out.name).info.run_id
        client.log_batch(run, params=[Param(k, str(v)[:6000]) for k, v in self.params.items()])
        self.note.write_text(json.dumps({"uri": self.uri, "run_id": run}))
        return client, run, 0

    def _experiment(self, client: Any) -> str:
        """The experiment `eagleray`; with our own SQLite its artifacts lie beside it and not in the working folder."""
        found = client.get_experiment_by_name("eagleray")
        if found:
            return found.experiment_id  # type: ignore[no-any-return]
        place = (self.out.parent / "mlflow-artifacts").as_uri() if self.uri.startswith("sqlite:") else None
        return client.create_experiment("eagleray", artifact_location=place)  # type: ignore[no-any-return]

    def _end(self, client: Any, run: str, status: str, files: list[Path]) -> None:
        try:
            for path in files:
                (client.log_artifacts if path.is_dir() else client.log_artifact)(
                    run, str(path), *[path.name] * path.is_dir()
                )
        finally:
            client.set_terminated(run, status)


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def check_writable(out: Path) -> None:
    """Make the run's folder. Raises UserError when nothing can be written there."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / ".probe"
        probe.write_text("")
        probe.unlink()
    except OSError as e:
        raise UserError(f"out={out}: cannot be written: {e.strerror}") from None
