"""The folder of a run: who may write there, what is logged there, and how the run is asked to stop."""

import fcntl
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from eagleray import checkpoint
from eagleray.errors import Outage, UserError
from eagleray.health import KINDS, Finding, words
from eagleray.picture import draw
from eagleray.track import JsonLines, MLflow, one_line, read_lines

log = logging.getLogger(__name__)
PATIENCE = 60  # seconds to wait for the last process of a killed run to let go of its folder


class Folder:
    """Rank 0 holds the lock and writes; the others only read, and log their warnings."""

    def __init__(self, path: Path, rank: int, tracking: str, params: Mapping[str, Any]) -> None:
        self.path, self.rank, self.tracking, self.params = path, rank, tracking, params
        self.closing: list[Callable[[], None]] = []
        self.mlflow: MLflow | None = None

    def __enter__(self) -> "Folder":
        if self.rank == 0:
            self._lock()
        handler = logging.FileHandler(self.path / "train.log")
        handler.setFormatter(logging.Formatter(f"%(asctime)s rank{self.rank} %(levelname)s %(message)s"))
        handler.setLevel(logging.DEBUG if self.rank == 0 else logging.WARNING)
        logger = logging.getLogger("eagleray")
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
        logger.propagate = False
        self.closing += [handler.close, lambda: logger.removeHandler(handler)]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, UserError | Outage):
            log.error("failed", exc_info=error)
        if self.mlflow:
            self.mlflow.close("FAILED" if error else "KILLED", [])
        for close in reversed(self.closing):
            close()

    def _lock(self) -> None:
        """One writer. Raises UserError when another process keeps the folder."""
        file = (self.path / ".lock").open("a+")
        self.closing.append(file.close)
        end = time.monotonic() + PATIENCE
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    file.seek(0)
                    raise UserError(f"out={self.path}: process {file.read()} is still running there") from None
                time.sleep(0.2)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()

    def begin(self, step: int) -> int:
        """Open the histories at a step, which is returned."""
        if self.rank == 0:
            with (self.path / "starts.jsonl").open("a") as f:
                f.write(json.dumps({"step": step, "time": round(time.time(), 1)}) + "\n")
            self.metrics = JsonLines(self.path / "metrics.jsonl", step=step)
            self.findings = JsonLines(self.path / "health.jsonl", step=step)
            self.mlflow = MLflow(self.path, self.tracking, self.params)
            if step:
                log.info("continuing from step %d", step)
        return step

    def stopping(self) -> bool:
        """Whether someone asked the run to stop; rank 0 speaks for all."""
        return self.rank == 0 and self.asked()

    def asked(self) -> bool:
        """The same, for a rank that waits and must ask for itself."""
        return (self.path / ".stop").exists()

    def log(self, record: Mapping[str, Any]) -> None:
        if self.rank == 0:
            self.metrics.log(record)
            assert self.mlflow is not None
            self.mlflow.log(record)

    def note_skip(self, step: int, keys: list[str]) -> None:
        if self.rank == 0:
            log.warning("step %d had no finite gradient and was skipped", step)
            with (self.path / "skipped.jsonl").open("a") as f:
                f.write(json.dumps({"step": step, "keys": keys}, ensure_ascii=False) + "\n")

    def records(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl so far, on rank 0."""
        return read_lines(self.path / "metrics.jsonl") if self.rank == 0 else []

    def note_findings(self, findings: Sequence[Finding]) -> None:
        """Say what is wrong, and what may help."""
        for found in findings if self.rank == 0 else ():
            log.warning("step %d: %s: %s; look at %s", found.step, found.kind, found.text, KINDS[found.kind])
            self.findings.log(asdict(found))

    def end(self, summary: dict[str, Any]) -> None:
        """Write the summary and hand the run's results to MLflow. Fills in restarts and bad samples."""
        if self.rank != 0:
            return
        starts = (self.path / "starts.jsonl").read_text().splitlines()
        bad = self.path / "quarantine.jsonl"
        summary["restarts"] = len(starts) - 1
        summary["bad_samples"] = len(bad.read_text().splitlines()) if bad.exists() else 0
        found = read_lines(self.path / "health.jsonl")
        summary["health"] = [f"{f['kind']} at step {f['step']}: {f['text']}" for f in found]
        log.info("health: %s", words(found))
        checkpoint.replace(self.path / "summary.json", json.dumps(summary, indent=1))
        assert self.mlflow is not None
        self.mlflow.log({"step": summary["steps"] + 1} | summary)
        files = [self.path / name for name in ("recipe.yaml", "summary.json", "export")]
        try:
            files.append(draw(self.path))
        except Exception as e:  # no picture is worth a run, and matplotlib may be missing
            log.warning("health.png was not drawn: %s", one_line(e))
        self.mlflow.close("FINISHED", files)
        self.mlflow = None
