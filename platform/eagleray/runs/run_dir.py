"""Manage the folder of a run: who may write to it, its log and histories, and the request to stop."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from eagleray.base import files
from eagleray.base.errors import Futile, Outage, UserError, one_line
from eagleray.base.files import JsonLines, read_lines
from eagleray.engine import checkpoint, sharded_checkpoint
from eagleray.engine.sharded_checkpoint import ShardWriter
from eagleray.runs import layout, remote
from eagleray.runs.attempts import Attempts
from eagleray.runs.health import KINDS, Finding, words
from eagleray.runs.plots import draw
from eagleray.runs.recipe import Recipe, flat
from eagleray.runs.tracking import RESULTS, MLflow, Tracking
from eagleray.storage.store import is_remote

log = logging.getLogger(__name__)
STARTS = 16  # in a row without a new checkpoint before a command gives up; the same command continues even then
PATIENCE = 60  # seconds to wait for the last process of a killed run to let go of its folder


class RunDir:
    """The folder of a run, as one rank uses it.

    Rank 0 holds the lock and writes; the others only read the folder and log warnings. If `out` is remote, this is a
    working folder on this machine, which rank 0 uploads.
    """

    def __init__(self, recipe: Recipe, rank: int, tracking: Tracking, *, command: float) -> None:
        """`command` is the time at which the user's command started, in seconds since 1970."""
        self.recipe, self.rank, self.tracking, self.command = recipe, rank, tracking, command
        self.out, self.path = recipe.out, remote.work_dir(recipe.out)
        self.closing: list[Callable[[], None]] = []
        self.mlflow: MLflow | None = None
        self.callbacks: Callable[[str, Any], None] = lambda event, argument: None
        self.starts: Attempts | None = None
        self.mirror: remote.Mirror | None = None
        self.shards: ShardWriter | None = None
        self.checkpoints, self.scratch = f"{self.out}/checkpoints", self.path / "checkpoints"

    def __enter__(self) -> "RunDir":
        self.path.mkdir(parents=True, exist_ok=True)
        self.stop_signal = remote.StopSignal(self.out)
        self.closing.append(self.stop_signal.close)
        if self.rank == 0:
            self.closing.append(files.lock_folder(self.path, patience=PATIENCE).close)
            if is_remote(self.out):
                self.mirror = remote.Mirror(self.out, str(self.command))
        first = self.mirror.copy if self.mirror else None
        keep = self.recipe.checkpoint.keep
        self.writer = checkpoint.Writer(self.checkpoints, keep=keep, scratch=self.scratch, first=first)
        self.closing.append(self.writer.wait)
        handler = logging.FileHandler(self.path / layout.LOG)
        handler.setFormatter(logging.Formatter(f"%(asctime)s rank{self.rank} %(levelname)s %(message)s"))
        handler.setLevel(logging.DEBUG if self.rank == 0 else logging.WARNING)
        logger = logging.getLogger("eagleray")
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
        logger.propagate = False
        self.closing += [handler.close, lambda: logger.removeHandler(handler)]
        if self.mirror:
            self.closing.append(self.mirror.close)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, UserError | Outage):
            log.error("failed", exc_info=error)
        if self.starts and (error is None or isinstance(error, UserError | Outage)):
            self.starts.add(ended=True)
        if self.mlflow:
            self.mlflow.close("FAILED" if error else "KILLED", [])
        for close in reversed(self.closing):
            close()

    def begin(self, step: int, ranks: int) -> int:
        """Open the histories at a step, and return it. Raises Futile after many starts without progress."""
        if self.rank == 0:
            self.starts = Attempts(self.path / layout.STARTS)
            if self.starts.in_vain(self.command) >= STARTS:
                raise Futile(f"started {STARTS} times from step {step} without a new checkpoint")
            lines = read_lines(self.path / layout.METRICS)
            self.starts.add(step=step, ranks=ranks, reached=lines[-1]["step"] if lines else 0)
            self.metrics = JsonLines(self.path / layout.METRICS, step=step)
            self.findings = JsonLines(self.path / layout.HEALTH, step=step)
            self.mlflow = MLflow(self.path, self.tracking, flat(self.recipe))
            if step:
                log.info("continuing from step %d with %d rank%s", step, ranks, "s" * (ranks > 1))
        return step

    def stopping(self) -> bool:
        """Return whether the run was asked to stop. All ranks get the answer of rank 0."""
        return self.rank == 0 and self.asked()

    def asked(self) -> bool:
        """Return whether the run was asked to stop, as far as this rank knows. For a rank that is waiting and cannot
        ask rank 0."""
        return self.stop_signal.asked()

    def log(self, record: Mapping[str, Any]) -> None:
        if self.rank == 0:
            self.metrics.log(record)
            assert self.mlflow is not None
            self.mlflow.log(record)

    def goodput(self, useful: float) -> dict[str, float]:
        """Return goodput, restarts and lost time, on rank 0. `useful` is the seconds of the steps that were not
        lost."""
        return self.starts.tally(useful) if self.starts else {}

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Save a checkpoint in the background. Called by rank 0 alone, or by all ranks if tensors are sharded."""
        state, rows = sharded_checkpoint.split(state)
        if not rows:
            self.writer.save(step, state)
            return
        if self.shards is None:
            self.shards = ShardWriter(self.writer.scratch, self.writer.store_file, scratch=is_remote(self.out))
            self.closing.append(self.shards.wait)
        finish = self.shards.save(checkpoint.step_name(step), rows)
        if self.rank == 0:
            self.writer.save(step, state, finish)
        else:
            self.shards.follow(finish)

    def saving(self) -> bool:
        return self.rank == 0 and self.writer.busy

    def settle(self) -> UserError | Outage | None:
        """Wait until the last checkpoint is saved. Returns the error that prevented it, or None."""
        try:
            self.writer.settle()
            if self.shards:
                self.shards.wait()
        except (UserError, Outage) as e:
            return e
        return None

    def note_skip(self, step: int, keys: list[str]) -> None:
        """Log a step whose gradients were not finite, with the keys of its images."""
        if self.rank == 0:
            log.warning("step %d had no finite gradient and was skipped", step)
            files.append_lines(self.path / layout.SKIPPED, [{"step": step, "keys": keys}])

    def records(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl so far, on rank 0."""
        return read_lines(self.path / layout.METRICS) if self.rank == 0 else []

    def note_findings(self, findings: Sequence[Finding]) -> None:
        """Log the findings, each with advice on what to change."""
        for found in findings if self.rank == 0 else ():
            log.warning("step %d: %s: %s; look at %s", found.step, found.kind, found.text, KINDS[found.kind])
            self.findings.log(asdict(found))

    def end(self, summary: dict[str, Any], useful: float) -> None:
        """Write the summary with restarts, goodput and the number of bad samples, and send the results to MLflow."""
        if self.rank != 0:
            return
        assert self.starts is not None
        summary |= self.starts.tally(useful)
        summary["bad_samples"] = len(read_lines(self.path / layout.QUARANTINE))
        found = read_lines(self.path / layout.HEALTH)
        summary["health"] = [f"{f['kind']} at step {f['step']}: {f['text']}" for f in found]
        log.info("health: %s", words(found))
        files.write_atomic(self.path / layout.SUMMARY, json.dumps(summary, indent=1))
        assert self.mlflow is not None
        self.mlflow.log({"step": summary["steps"] + 1} | summary)
        try:
            draw(self.path)
        except Exception as e:  # no picture is worth a run, and matplotlib may be missing
            log.warning("health.png was not drawn: %s", one_line(e))
        self.mlflow.close("FINISHED", [self.path / name for name in RESULTS])
        self.mlflow = None


def finished(folder: Path, steps: int = 0) -> dict[str, Any] | None:
    """Return the summary of a run that has taken at least `steps` steps, or None."""
    path = folder / layout.SUMMARY
    summary = json.loads(path.read_text()) if path.exists() else None
    return summary if summary and summary["steps"] >= steps else None
