"""Send a run's history to MLflow from a thread, if MLflow is installed. Training never waits for it.

Records that a server did not receive while it was away are sent when it is back."""

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagleray.base.errors import hide_secrets, one_line
from eagleray.base.files import read_history
from eagleray.runs import layout
from eagleray.runs.mlflow_client import REPLY, STORED, configure, now
from eagleray.runs.mlflow_model import Backbone
from eagleray.runs.mlflow_run import Job, MLflowRun
from eagleray.runs.system_metrics import Machine
from eagleray.runs.tracking import DataInput, Tracking

log = logging.getLogger(__name__)
RESULTS = (layout.RECIPE, layout.SUMMARY, layout.HEALTH_PLOT, layout.PLACES)  # the files that MLflow gets of a run
BUFFER = 10_000  # records in memory while MLflow is away; metrics.jsonl has the older ones
GATHER = 1.0  # seconds of records that go into one request
PAUSE = 20.0  # seconds between two attempts, at most
PATIENCE = 60.0  # seconds without an answer for which the end of a finished run waits
BRIEF = 5.0  # and that of one that was stopped, and is to be continued
LONGEST = 600.0  # and with answers, as files are sent
LOAD = 30.0  # seconds between two measurements of the machine's load
DATABASES = ("sqlite:", "postgresql", "mysql", "mssql")


class MLflow:
    """One run in MLflow, which continues over restarts. A thread sends the records."""

    def __init__(
        self, out: Path, tracking: Tracking, params: Mapping[str, Any], inputs: Sequence[DataInput] = (), step: int = 0
    ) -> None:
        """`params` are the dotted keys of the resolved recipe, `inputs` the data sets of the run, and `step` is the one
        that the run has reached."""
        self.out, self.uri, self.params, self.inputs = out, tracking.uri, params, inputs
        self.run = MLflowRun(tracking, out / layout.MLFLOW, tracking.name or out.name, params, inputs)
        self.queue: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self.records: deque[Job] = deque(maxlen=BUFFER)  # not yet sent
        self.file = True  # whether metrics.jsonl may have lines that are neither sent nor in memory
        self.began = now()  # the time of such lines, the same in every attempt: MLflow keeps what differs twice
        self.machine, self.load_time = Machine(out), time.monotonic()
        self.loads: deque[Job] = deque(maxlen=1000)
        self.step = step
        self.why = "no answer"  # why the last attempt failed
        self.end: tuple[str, Sequence[Path], Backbone | None] | None = None
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
        """Send the remaining records and the files, and end the run with a `status` of MLflow. The backbone of a
        finished run with an export becomes a model. If the server is away, this waits for a minute, or for seconds
        when the run is not finished, then warns about what was not sent."""
        patience = PATIENCE if status == "FINISHED" else BRIEF
        configure(STORED)
        self.end = status, files, self._backbone() if status == "FINISHED" else None
        self.ending.set()
        began = time.monotonic()
        while self.thread.is_alive() and time.monotonic() - began < LONGEST:
            if not self.run.storing and time.monotonic() - max(began, self.run.answered) > patience:
                break
            self.thread.join(timeout=0.1)
        if self.thread.is_alive():
            self.given_up.set()
            log.warning(
                "MLflow at %s: %s; it lacks %s%s; the same command sends the rest",
                hide_secrets(self.uri),
                self.why,
                # A server that never answered may have more of a run that was continued.
                f"the steps after {self.run.latest.get('loss', 0)}" if self.run.answered else "steps of this start",
                f", and {', '.join(f.name for f in files)}" if files else "",
            )

    def _backbone(self) -> Backbone | None:
        """Return the backbone that the run has exported; None where there is none."""
        if not (self.out / layout.EXPORT / "backbone.json").exists():
            return None
        size, resize = self.params.get("evaluate.size", 224), self.params.get("evaluate.resize", 256)
        data = "".join(d.digest for d in self.inputs[-1:])
        return Backbone(self.out, size, resize, data, self.params.get("track.register"))

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
                self.why = why
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
