"""Send the numbers of a run to MLflow while it trains, through the queue of MLflow's client. Training never waits.

Only one request is on its way at a time, so that numbers arrive in order. After an outage the run is opened again, and
the lines of metrics.jsonl that the server lacks are sent. The load of the machine is sent under the names and in the
units that MLflow uses."""

import contextlib
import logging
import shutil
import subprocess
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import psutil

from eagleray.base import child
from eagleray.base.errors import Outage, UserError, hide_secrets
from eagleray.runs import layout
from eagleray.runs.mlflow_run import MOST, REPLY, MLflowRun, configure, metrics_of, now, records_of, told
from eagleray.runs.tracking import DataInput, Tracking, reserve

log = logging.getLogger(__name__)
LOAD = 30.0  # seconds between two measurements of the machine's load, and between attempts during an outage
SOON = 2.0  # seconds for which the end of a run waits for MLflow without a message
LONGEST = 60.0  # most seconds for which the end of a run then waits: to open the run, and again for the last answer
MEGA = 1e6
GPU = ("utilization.gpu", "memory.used", "memory.total", "power.draw")  # fields that nvidia-smi is asked for


class MLflow:
    """One run in MLflow, which continues over restarts."""

    def __init__(
        self, out: Path, tracking: Tracking, params: Mapping[str, Any], inputs: Sequence[DataInput] = (), step: int = 0
    ) -> None:
        """`params` are the dotted keys of the resolved recipe, `inputs` the data sets of the run, and `step` is the
        number of steps that it has taken."""
        self.out, self.uri, self.params, self.step = out, tracking.uri, params, step
        self.run = MLflowRun(tracking, out / layout.MLFLOW, tracking.name or out.name, params, inputs)
        self.waiting: list[Any] = []  # numbers still to send
        self.batch: list[Any] = []  # numbers of the request on its way
        self.flying: Future[Any] | None = None
        self.loads: deque[Any] = deque(maxlen=10 * MOST)
        self.ready = self.away = self.over = False  # ready: run open; away: no answer; over: nothing more is sent
        self.began = now()  # time of lines that are sent late; with other times MLflow would store them twice
        self.closing = threading.Event()
        configure(REPLY)
        self.thread = threading.Thread(target=self._watch, name="mlflow", daemon=True)
        try:
            import mlflow  # noqa: F401  # imported here, and not in the thread, to know whether it is missing
        except ImportError:
            self.over = True
            log.warning("mlflow is not installed: metrics go to metrics.jsonl alone")
        else:
            reserve(tracking, self.run.note, self.run.name, inputs)
            self.thread.start()

    def log(self, record: Mapping[str, Any]) -> None:
        """Send a record, or keep it for the next request. Returns at once, whatever the server does."""
        if self.over:
            return
        self.step = record["step"]
        self.waiting += metrics_of(record, now())
        if self.flying and self.flying.done():
            self._landed()
        if not self.ready:
            del self.waiting[: -10 * MOST]  # older numbers are in metrics.jsonl, from which `_open` sends them
        elif not self.flying:
            self.waiting += [self.loads.popleft() for _ in range(len(self.loads))]
            self.batch, self.waiting = self.run.new(self.waiting[:MOST]), self.waiting[MOST:]
            with self._reaching():
                if self.batch:  # the private future below tells when it has been sent; nothing public does
                    sent = self.run.client.log_batch(self.run.id, self.batch, synchronous=False)
                    [self.flying] = sent._operation_futures

    def _landed(self) -> None:
        """Record that the numbers of the request that has ended are on the server or, if it failed, still to send."""
        assert self.flying is not None
        error, self.flying = self.flying.exception(), None
        if error:
            self._lost(error)
        else:
            self.run.latest |= {m.key: m.step for m in self.batch}
            self.batch = []

    def _watch(self) -> None:
        """Open the run, also again after an outage, and measure the load of the machine."""
        machine = Machine(self.out)
        while not self.over:
            if not self.ready:
                with self._reaching():
                    self._open()
            if self.closing.wait(LOAD):
                return
            self.loads.extend(metrics_of({"step": self.step} | machine.look(), now()))

    def _open(self) -> None:
        """Open the run, and send the lines of metrics.jsonl that MLflow lacks. `log` does not send these again."""
        self.run.open()
        older = [m for r in records_of(self.out) for m in metrics_of(r, self.began)]
        self.run.send(self.run.new(older))
        if self.away:
            log.info("MLflow at %s answers again", hide_secrets(self.uri))
        self.ready, self.away = True, False

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        """A context for requests, whose errors are logged in one line, as no number is worth ending a run."""
        try:
            yield
        except Exception as e:  # errors may be of any class, as the client may be of another version
            self._lost(e)

    def _lost(self, error: BaseException) -> None:
        """Log in one line that MLflow gets nothing for now, or nothing any more if only a person can resolve the error.
        The numbers of the failed request are kept, to be sent again."""
        if self.batch:
            self.waiting, self.batch = self.batch + self.waiting, []
        error, known, self.ready, self.away = told(self.uri, error), self.away, False, True
        if isinstance(error, UserError):
            self.over = True
            log.warning("%s; then `eagleray track %s` sends the run", error, self.params.get("out", self.out))
        elif not known:
            log.warning("%s; `eagleray track %s` sends what is missing", error, self.params.get("out", self.out))

    def close(self, status: str, files: Sequence[Path]) -> None:
        """Send the remaining numbers and the files, and end the run with a `status` of MLflow. The backbone of a
        finished run with an export becomes a model. This waits for open requests, at most about twice LONGEST."""
        self.closing.set()
        if self.over:
            return
        for seconds in (SOON, LONGEST):
            self.thread.join(seconds)
            pending = wait([self.flying] if self.flying else (), seconds).not_done
            if not pending and not self.thread.is_alive():
                break
            if seconds == SOON:
                log.info("waiting for MLflow at %s, %.0f s at most", hide_secrets(self.uri), 2 * LONGEST)
        with self._reaching():
            if pending or self.thread.is_alive():
                raise Outage(f"MLflow at {hide_secrets(self.uri)}: no answer")
            if self.flying:
                self._landed()
            if not self.ready:
                self._open()
            self.run.send(self.run.new([*self.waiting, *self.loads]))
            self.run.end(status, files, self.out if status == "FINISHED" else None)
        self.over = True


class Machine:
    """Measures the load of this machine each time it is asked. Shares and rates are averages since the last time.
    None of the numbers reveals an address or a process."""

    def __init__(self, folder: Path) -> None:
        """`folder` lies on the disk whose usage is reported."""
        self.folder, self.smi = folder, shutil.which("nvidia-smi")
        psutil.cpu_percent()  # the first call only begins the measurement
        self.network = network()

    def look(self) -> dict[str, float]:
        """Return the current load of the machine, by the names that MLflow gives to these metrics."""
        memory, before, self.network = psutil.virtual_memory(), self.network, network()
        found = {
            "cpu_utilization_percentage": psutil.cpu_percent(),
            "system_memory_usage_megabytes": (memory.total - memory.available) / MEGA,
            "system_memory_usage_percentage": memory.percent,
            "network_receive_megabytes": (self.network[0] - before[0]) / MEGA,
            "network_transmit_megabytes": (self.network[1] - before[1]) / MEGA,
        }
        with contextlib.suppress(OSError):  # the disk may have been unmounted
            disk = shutil.disk_usage(self.folder)
            found["disk_usage_percentage"] = 100 * disk.used / disk.total
            found["disk_available_megabytes"] = disk.free / MEGA
        return {f"system/{k}": round(v, 2) for k, v in (found | self._gpus()).items()}

    def _gpus(self) -> dict[str, float]:
        """Return the load of each GPU from nvidia-smi, as NVIDIA's Python library is not installed everywhere."""
        if not self.smi:
            return {}
        command = [self.smi, f"--query-gpu={','.join(GPU)}", "--format=csv,noheader,nounits"]
        try:
            rows = child.run(command, text=True, timeout=20, check=True).stdout.splitlines()
        except (OSError, subprocess.SubprocessError):
            self.smi = None
            return {}
        return {f"gpu_{i}_{k}": v for i, row in enumerate(rows) for k, v in gpu(row).items()}


def gpu(row: str) -> dict[str, float]:
    """Return the numbers in a line of nvidia-smi. A GPU that is partitioned or very old does not report all of them."""
    said = {}
    for name, text in zip(GPU, row.split(","), strict=False):
        with contextlib.suppress(ValueError):
            said[name] = float(text)
    found = {"utilization_percentage": said.get("utilization.gpu"), "power_usage_watts": said.get("power.draw")}
    used, all = said.get("memory.used"), said.get("memory.total")
    if used is not None and all:
        found |= {"memory_usage_megabytes": used * 2**20 / MEGA, "memory_usage_percentage": 100 * used / all}
    return {k: v for k, v in found.items() if v is not None}


def network() -> tuple[int, int]:
    """Return the bytes received and sent by all network interfaces except loopback."""
    counts = [c for name, c in psutil.net_io_counters(pernic=True).items() if name != "lo"]
    return sum(c.bytes_recv for c in counts), sum(c.bytes_sent for c in counts)
