"""Manage the folder of a run: who may write to it, its log and histories, and the request to stop."""

import contextlib
import errno
import json
import logging
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from eagleray.base import dist, files
from eagleray.base.errors import Futile, Outage, Preempted, UserError, one_line
from eagleray.base.files import JsonLines, read_history, read_lines
from eagleray.data.quarantine import Quarantine
from eagleray.engine import checkpoint, sharded_checkpoint
from eagleray.engine.checkpoint_files import last_epoch
from eagleray.engine.sharded_checkpoint import ShardWriter
from eagleray.runs import layout
from eagleray.runs.attempts import Attempts, read_starts
from eagleray.runs.background import side_work
from eagleray.runs.health import AT_END, KINDS, Finding, words
from eagleray.runs.recipe import Recipe, flat
from eagleray.runs.run_store import FolderClaim, run_store
from eagleray.runs.stop_signal import StopSignal
from eagleray.runs.summary import CHECKED, HEALTH, UNCHECKED, finished, read_summary
from eagleray.runs.tracking import DataInput, Tracking
from eagleray.storage.store import store

if TYPE_CHECKING:  # imported late otherwise, as only rank 0 or a run in a bucket needs them
    from eagleray.runs.bucket_files import Mirror
    from eagleray.runs.lease import Lease
    from eagleray.runs.mlflow_log import MLflow

log = logging.getLogger(__name__)
STARTS = 16  # starts in a row without a new checkpoint after which a command gives up; the user can repeat it
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)  # errors of a full or broken disk, for a person to resolve


class RunDir:
    """The folder of a run, as one rank uses it.

    Rank 0 claims the run and writes; the other ranks only read the folder and log warnings. For a run in a bucket this
    is a working folder on this machine, which rank 0 uploads."""

    def __init__(
        self, recipe: Recipe, rank: int, tracking: Tracking, *, command: str, stop: threading.Event | None = None
    ) -> None:
        """`command` is the id of the user's command, and `stop` an event by which a command asks a run in its own
        process to stop."""
        self.recipe, self.rank, self.tracking, self.command = recipe, rank, tracking, command
        self.out, self.store, self.stop = recipe.out, run_store(recipe.out), stop
        self.path = self.store.work
        self.epoch = 0  # the epoch in the names of this start's checkpoints
        self.closing = contextlib.ExitStack()
        self.mlflow: MLflow | None = None
        self.callbacks: Callable[[str, Any], None] = lambda event, argument: None
        self.starts: Attempts | None = None
        self.histories: tuple[JsonLines, ...] = ()  # the open histories; only on rank 0, after `begin`
        self.bad: Sized = ()  # the samples in quarantine
        self.claim: FolderClaim | Lease | None = None  # only rank 0 has one
        self.mirror: Mirror | None = None
        self.shards: ShardWriter | None = None
        self.checkpoints, self.scratch = f"{self.out}/checkpoints", self.path / "checkpoints"

    def __enter__(self) -> "RunDir":
        try:
            self._open()
        except BaseException as e:
            self.closing.close()
            self._explain(e)
            raise
        return self

    def _open(self) -> None:
        files.make_folder(self.path)
        self.stop_signal = StopSignal(self.out, self.command, self.stop)
        self._at_end(self.stop_signal.close)
        if self.rank == 0:
            self.claim = self._hold()
            self._at_end(self.claim.close)
            self.epoch, self.mirror = self.claim.epoch, self.store.mirror(self.claim)
        self.writer = checkpoint.Writer(
            self.checkpoints,
            keep=self.recipe.checkpoint.keep,
            scratch=self.scratch,
            first=self.mirror.copy if self.mirror else self.store.flush,
            epoch=self.epoch,
            guard=self.claim.check if self.claim else lambda: None,
        )
        self._at_end(self.writer.wait)
        handler = LogFile(self.path / layout.LOG)
        handler.setFormatter(logging.Formatter(f"%(asctime)s rank{self.rank} %(levelname)s %(message)s"))
        handler.setLevel(logging.DEBUG if self.rank == 0 else logging.WARNING)
        logger = logging.getLogger("eagleray")
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
        logger.propagate = False
        self._at_end(handler.close)
        self._at_end(lambda: logger.removeHandler(handler))
        if self.mirror:
            self._at_end(self.mirror.close)

    def _hold(self) -> "FolderClaim | Lease":
        after, patience = last_epoch(checkpoint.blobs_of(self.checkpoints)), 60 * self.recipe.data.patience
        return self.store.claim(layout.OWNER, self.command, log.info, after=after, patience=patience)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Preempted):
            log.info("%s; the run has saved and starts again", error)
        elif isinstance(error, Exception) and not isinstance(error, UserError | Outage) and not is_full(error):
            log.error("the run failed: %s: %s", type(error).__name__, one_line(error), exc_info=error)
        elif isinstance(error, OSError) and self.mlflow:  # logged before MLflow fails on the same disk
            log.error("ends: %s", _of_disk(error))
        if self.starts and (error is None or isinstance(error, UserError | Outage)):
            self.starts.add(ended=True)
        if self.mlflow:
            mlflow = self.mlflow
            self._at_end(lambda: mlflow.close("FAILED" if error else "KILLED", self._results()))
        self.closing.close()
        self._explain(error)

    def _at_end(self, close: Callable[[], object]) -> None:
        """Call `close` when the run ends, before the functions that were passed here earlier. If it fails, this is
        logged as a warning, and the others are still called."""

        def attempt() -> None:
            with side_work(f"closing {self.out}"):
                close()

        self.closing.callback(attempt)

    def _explain(self, error: BaseException | None) -> None:
        """Raise UserError if `error` is that of a full or broken disk, and else do nothing."""
        if isinstance(error, OSError) and is_full(error):
            line = f"out={self.out}: cannot be written: {_of_disk(error)}; the same command continues"
            raise UserError(line) from error

    def begin(
        self,
        step: int,
        ranks: int,
        inputs: Sequence[DataInput] = (),
        *,
        lengths: Mapping[str, int] | None,
        **about: Any,
    ) -> None:
        """Open the histories at a step. `inputs` are the data sets that are read. `lengths` is what `lengths()` gave
        for the checkpoint of this step, or None without one. The values in `about` are added to this start's line in
        starts.jsonl. Raises Futile after many starts without progress, and UserError when `track.also` needs a package
        that is missing."""
        if self.rank == 0:
            self.starts = Attempts(self.path / layout.STARTS)
            if self.starts.in_vain(self.command) >= STARTS:
                raise Futile(f"started {STARTS} times from step {step} without a new checkpoint")
            lines = read_history(self.path / layout.METRICS)
            reached = lines[-1]["step"] if lines else 0
            self.starts.add(step=step, ranks=ranks, reached=reached, command=self.command, **about)
            self.cut(step, lengths or {})
            if self.mirror:
                self.mirror.start()  # histories only grow from here on
            from eagleray.runs.mlflow_log import MLflow
            from eagleray.runs.sinks import Sinks

            self.sinks = Sinks(self.recipe.track.also, self.path, step, flat(self.recipe))
            self._at_end(self.sinks.close)
            self._at_end(self._write_late)
            self.mlflow = MLflow(self.path, self.tracking, flat(self.recipe), inputs, step)
            if lengths is not None:
                log.info("continuing from step %d with %d rank%s", step, ranks, "s" * (ranks > 1))

    def cut(self, step: int, found: Mapping[str, int]) -> None:
        """On rank 0, drop the lines of histories about later steps than this one, at which the run continues.

        Findings and bad samples cannot be cut by step, as they are noted later than their steps or have none. As many
        of their lines stay as the checkpoint counted: `found`, by file name; empty without a checkpoint. If the run had
        ended at a later step, its summary and its export are deleted."""
        if read_summary(self.path).get("steps", 0) > step:  # the run goes back to before its end
            (self.path / layout.SUMMARY).unlink()
            shutil.rmtree(self.path / layout.EXPORT, ignore_errors=True)
        skipped = self.path / layout.SKIPPED  # most runs have none
        self.skipped = JsonLines(skipped, step=step if skipped.exists() else None)
        self.steps = JsonLines(self.path / layout.STEPS, step=step)
        self.findings = JsonLines(self.path / layout.HEALTH, lines=found.get(layout.HEALTH, 0))
        if (bad := self.path / layout.QUARANTINE).exists():
            JsonLines(bad, lines=found.get(layout.QUARANTINE, 0))
        # metrics.jsonl tells how far the run was, so it is cut last: a start that is killed before can be repeated.
        self.metrics = JsonLines(self.path / layout.METRICS, step=step)
        self.histories = (self.skipped, self.metrics, self.steps, self.findings)

    def lengths(self) -> dict[str, int]:
        """Return, on rank 0, the number of lines of the histories that a later start cannot cut by step (see `cut`)."""
        return {layout.HEALTH: self.findings.count, layout.QUARANTINE: len(self.bad)} if self.rank == 0 else {}

    def ended(self, steps: int) -> dict[str, Any] | None:
        """Return, on rank 0, the summary of a run whose last start has taken all `steps` and ended, else None."""
        [*_, last] = [{}, *read_starts(self.path / layout.STARTS)]
        return finished(self.path, steps) if "ended" in last else None

    def starts_in_vain(self) -> int:
        """Return how many starts of this command in a row, this one included, began at the same step."""
        return self.starts.in_vain(self.command) if self.starts else 0

    def stopping(self) -> bool:
        """Return, on rank 0, whether the run was asked to stop, for `Agreement` to pass on to all ranks."""
        return self.rank == 0 and self.asked()

    def asked(self) -> bool:
        """Return whether the run was asked to stop, as far as this rank knows. This is for a rank that waits for data
        and cannot ask rank 0."""
        return self.stop_signal.asked() or (self.claim is not None and self.claim.lost)

    def log(self, record: Mapping[str, Any]) -> None:
        if self.rank == 0:
            self.metrics.log(record)
            self._send(record)

    def log_start(self, scores: Mapping[str, float]) -> None:
        """On rank 0, store the scores of the backbone that the run starts from, and send them to trackers."""
        if self.rank == 0:
            files.write_atomic(self.path / layout.START_SCORES, json.dumps(scores, indent=1))
            self._send({"step": 0, **scores})

    def _send(self, record: Mapping[str, Any]) -> None:
        """Send a record to MLflow and to the recipe's other sinks."""
        assert self.mlflow is not None
        self.mlflow.log(record)
        self.sinks.log(record)

    def log_steps(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """On rank 0, write `lines` to steps.jsonl: the loss and the gradient norm of each step, in full precision."""
        if self.rank == 0:
            self.steps.log(*lines)

    def trained(self, step: int) -> None:
        """On rank 0, record that the last step was taken."""
        if self.starts:
            self.starts.trained(step)

    def goodput(self, useful: float) -> dict[str, float]:
        """Return goodput, restarts and lost time on rank 0, nothing on others. `useful`: seconds of steps not lost."""
        return self.starts.tally(useful) if self.starts else {}

    def _write_late(self) -> None:
        """Write lines that a full disk has refused: once a checkpoint is saved, no restart would write them again."""
        for lines in self.histories:
            lines.log()

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Save a checkpoint in the background. Called by rank 0 alone, or by all ranks if tensors are sharded."""
        self._write_late()
        state, rows = sharded_checkpoint.split(state)
        if not rows:
            self.writer.save(step, state)
            return
        self.writer.wait()  # ranks share one process group to agree that rows are stored, so one checkpoint at a time
        if self.shards is None:
            self.shards = ShardWriter(self.writer.scratch, self.writer.store_file, scratch=self.writer.copies)
            self._at_end(self.shards.wait)
        finish = self.shards.save(checkpoint.step_name(step, self.epoch), rows)
        if self.rank == 0:
            self.writer.save(step, state, finish)
        else:
            self.shards.follow(finish)

    def keep(self, step: int | None) -> None:
        """Keep the checkpoint of a step in addition to the newest ones; None: only these."""
        self.writer.best = step

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
        """On rank 0, log a step whose gradients were not finite, with the keys of its images."""
        if self.rank == 0:
            log.warning("step %d had no finite gradient and was skipped", step)
            self.skipped.log({"step": step, "keys": keys})

    def records(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl so far on rank 0, and none on others."""
        return read_history(self.path / layout.METRICS) if self.rank == 0 else []

    def note_findings(self, findings: Sequence[Finding]) -> None:
        """On rank 0, log the findings with advice on what to change. Known findings of the evaluation at the end are
        left out, as this evaluation is repeated when its process has died."""
        known = [(f["step"], f["kind"]) for f in self._found()] if findings else []
        for found in findings if self.rank == 0 else ():
            if (found.step, found.kind) in known and found.kind in AT_END:
                continue
            log.warning("step %d: %s: %s; look at %s", found.step, found.kind, found.text, KINDS[found.kind])
            self.findings.log(asdict(found))

    def _found(self) -> list[dict[str, Any]]:
        """Return the findings so far on rank 0, and none on others."""
        return read_history(self.path / layout.HEALTH) if self.rank == 0 else []

    def has_line(self, step: int) -> bool:
        """Return, on rank 0, whether metrics.jsonl has the line of a step. Other ranks return False."""
        return any(record["step"] == step for record in self.records())

    def begin_online(self, step: int) -> int:
        """On rank 0, record that the evaluation at a step of the training begins, and return how often it has begun
        with as many ranks, this time included: Ray ends it to change their number. Other ranks return 0."""
        if self.rank != 0:
            return 0
        path, now = self.path / layout.EVALUATION, {"step": step, "ranks": dist.size()}
        [*_, last] = [{}, *read_lines(path)]
        starts = last["starts"] + 1 if last.items() >= now.items() else 1
        files.write_atomic(path, json.dumps(now | {"starts": starts}) + "\n")
        return starts

    def begin_evaluation(self, summary: Mapping[str, Any]) -> int:
        """On rank 0, write the summary without scores, and return how often the evaluation at the end has begun, this
        time included: it is given up if the process keeps dying in it. Other ranks return 0."""
        if self.rank != 0:
            return 0
        known, path = read_summary(self.path), self.path / layout.SUMMARY
        ranks = {start.get("ranks") for start in (self.starts.starts[-2:] if self.starts else [])}
        again = known.get("steps") == summary["steps"] and len(ranks) < 2  # Ray ends it to change their number
        starts = (int(known.get(layout.EVALUATION_STARTS, 0)) if again else 0) + 1
        files.write_atomic(path, json.dumps({**summary, layout.EVALUATION_STARTS: starts}, indent=1))
        return starts

    def end(self, summary: dict[str, Any], useful: float) -> None:
        """On rank 0, write the summary with restarts, goodput and bad samples, and send the results to MLflow."""
        if self.rank != 0:
            return
        assert self.starts is not None
        assert self.claim is not None
        self.claim.check()
        self._write_late()
        summary |= self.starts.tally(useful)
        summary["bad_samples"] = len(Quarantine(self.path / layout.QUARANTINE, samples=1, limit=1))
        found = self._found()
        summary[HEALTH] = [f"{f['kind']} at step {f['step']}: {f['text']}" for f in found]
        log.info("health: %s; checked: %s", words(found), "; ".join(summary.get(CHECKED) or ["nothing"]))
        if summary.get(UNCHECKED):
            log.info("not checked: %s", "; ".join(summary[UNCHECKED]))
        files.write_atomic(self.path / layout.SUMMARY, json.dumps(summary, indent=1))
        self._send({"step": summary["steps"] + 1} | summary)
        with side_work(f"{layout.HEALTH_PLOT} was not drawn"):  # matplotlib may be missing
            from eagleray.runs.plots import draw

            draw(self.path)
        assert self.mlflow is not None
        self.mlflow.close("FINISHED", self._results())
        self.mlflow = None

    def _results(self) -> list[Path]:
        """Write the list of the run's checkpoints, and return the existing files that MLflow gets when the run ends."""
        with side_work(f"{layout.PLACES} was not written"):
            has_any = checkpoint.blobs_of(self.checkpoints)  # a run that failed early has no folder of them
            blobs = store(self.out).list(f"{self.checkpoints}/", "step-") if has_any else []
            places = [asdict(b) for b in sorted(blobs, key=lambda b: b.url) if not b.url.endswith(".json")]
            files.write_atomic(self.path / layout.PLACES, json.dumps(places, indent=1))
        from eagleray.runs.mlflow_run import RESULTS

        return [path for name in RESULTS if (path := self.path / name).exists()]


class LogFile(logging.FileHandler):
    """The log of a run. A line that a full disk does not take is lost, without a traceback for each."""

    def handleError(self, record: logging.LogRecord) -> None:  # `logging` calls it by this name
        pass


def is_full(error: BaseException) -> bool:
    """Return whether an error is that of a disk that is full or broken."""
    return isinstance(error, OSError) and error.errno in FULL


def _of_disk(error: OSError) -> str:
    """Say which file could not be written, where that is known, and why."""
    return (f"{error.filename}: " if error.filename else "") + (error.strerror or str(error))
