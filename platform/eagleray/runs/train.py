"""Take the steps of a run: batch, step, log, evaluate, save, stop."""

import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from eagleray.base import dist
from eagleray.base.errors import Outage, Preempted, UserError
from eagleray.config.schedule import Progress
from eagleray.data.loader import Loader
from eagleray.data.loader_processes import processes
from eagleray.data.quarantine import Quarantine, broken
from eagleray.engine.compiling import compiles
from eagleray.runs import evaluations, layout
from eagleray.runs.agreement import Agreement, Cadence
from eagleray.runs.build import make_trainer
from eagleray.runs.memory import choose_micro_batch, set_micro_batch
from eagleray.runs.profile import Profiler
from eagleray.runs.rank_run import RankRun, save_checkpoint
from eagleray.runs.step_log import StepLog

log = logging.getLogger(__name__)


def train(run: RankRun, start: int) -> int:
    """Take the steps from `start` on. Returns the number of steps of the run so far: fewer than planned if it was asked
    to stop or, with `start.keep_best`, was ended by `start.stop_below`.

    Raises UserError or Outage when the data cannot be read any more, and Preempted when a machine is about to be taken
    away or added, each after saving a checkpoint."""
    plan, world, folder = run.plan, run.world, run.folder
    finish_line(run, start)
    compiled, workers = compiles(plan.recipe.compile, world.device), processes(plan.recipe.data.workers, world.cpus)
    loader = Loader(
        plan.stream,
        rank=world.rank,
        ranks=world.size,
        workers=workers,
        device=world.device,
        compiled=compiled,
        crops=plan.recipe.data.crops,
    )
    if plan.recipe.optim.micro_batch == "auto":
        fit_micro_batch(run, start, loader)
    run.monitor.step = step = start
    cadence, quarantine = Cadence(plan, start), open_quarantine(run)
    ranks = Agreement(world, folder, quarantine, cadence)
    step_log = StepLog(plan, world, folder, quarantine, run.monitor, run.clock, run.line, loader)
    trainer = make_trainer(plan.recipe, run.method, run.optimizer, run.precision, run.wrap)
    batches = loader.batches(start, plan.steps, should_stop=folder.asked)
    lost = ""  # why the run ends, if its features have got too much worse than at the start

    with Profiler(plan.recipe.profile if world.rank == 0 else None, folder.path, world.device) as profiler:
        while step < plan.steps:
            profiler.before(step + 1)
            batch, bad = ranks.next_batch(batches)
            decision = ranks.decide(step + 1, bad, stop=batch is None)
            if batch is None or not decision.goes_on:
                break

            taken = trainer.step(plan.at(step), batch)
            step += 1
            step_log.add(taken)
            folder.callbacks("step", taken)

            if run.guard.due(step) and (lost := look_at_start(run, step_log, step)):
                break
            if cadence.records(step):
                write_record(run, step_log, taken.at, evaluation=cadence.evaluates(step))
            if cadence.evaluates(step):  # the evaluation has saved a checkpoint
                cadence.saved(step)
            if decision.saves and cadence.saved_step < step:
                step_log.settle(step)
                save_checkpoint(run, step)
                cadence.saved(step)
            step_log.end_step()

    if step_log.taken:  # the steps ended before a line was due
        write_record(run, step_log, plan.at(step - 1), evaluation=False)
    if cadence.saved_step < step and (run.guard.over or not lost):
        save_checkpoint(run, step)
    if problem := first_problem(dist.gather_objects(folder.settle()), ranks.problem):
        raise problem
    if lost and not run.guard.over:
        raise UserError(lost)
    return step


def write_record(run: RankRun, step_log: StepLog, at: Progress, *, evaluation: bool) -> None:
    """Write a line of metrics.jsonl with the means since the last line. With `evaluation`, save a checkpoint and
    evaluate first, and add the scores."""
    record = step_log.flush(at, run.plan.lr(at)) | run.guard.flush()
    if evaluation:
        run.line.record = record
        run.folder.begin_online(at.step + 1)
        save_checkpoint(run, at.step + 1)
        run.folder.settle()  # a warning is in the log if the checkpoint could not be saved
        record |= evaluations.online(run, at.step + 1)
        run.line.record = {}
        step_log.since = time.perf_counter()  # images/s does not count the time of the evaluation
    log_record(run, record)


def finish_line(run: RankRun, step: int) -> None:
    """If an earlier start was killed between the checkpoint of this step and its evaluation, evaluate now and write the
    line of metrics.jsonl that is missing."""
    line = run.line
    record, line.record = line.record, {}
    if record and not dist.from_rank_zero(partial(run.folder.has_line, step)):
        starts = dist.from_rank_zero(partial(run.folder.begin_online, step))
        log_record(run, record | evaluations.online(run, step, starts))


def log_record(run: RankRun, record: dict[str, Any]) -> None:
    """Write a line of metrics.jsonl."""
    run.folder.log(record)
    run.folder.callbacks("log", record)
    if run.world.rank == 0:
        run.world.show(record, run.plan.steps)


def look_at_start(run: RankRun, step_log: StepLog, step: int) -> str:
    """Compare the features with those at the start, record the findings, and return why the run ends, if it does."""
    began, guard = time.perf_counter(), run.guard
    run.compare_with_start(step)
    run.folder.note_findings(guard.findings())
    step_log.since += time.perf_counter() - began  # images/s does not count the time of this comparison
    lost = guard.lost()
    guard.over = bool(lost) and guard.returns is not None
    return lost


def first_problem(saving: Sequence[Exception | None], own: Exception | None) -> Exception | None:
    """Return why the run ends: the first error of the ranks' `saving`, else the `own` error that ended the steps, or
    None. On a machine that is about to be taken away, an Outage while saving is only logged: it costs the steps since
    the last checkpoint, and not the run."""
    for problem in saving:
        if isinstance(own, Preempted) and isinstance(problem, Outage):
            log.warning("the last steps are not saved: %s", problem)
        elif problem:
            return problem
    return own


def fit_micro_batch(run: RankRun, start: int, loader: Loader) -> None:
    """Let the backbones take as many images at once as fit into memory."""
    moments = sum(v.nbytes for s in run.optimizer.state.values() for v in s.values() if torch.is_tensor(v))
    model, at = run.anchor.joined(run.method), run.plan.at(start)
    size = choose_micro_batch(run.plan.recipe, run.method, run.precision, at, loader.rows, model, moments, loader)
    set_micro_batch(run.method, size)
    run.monitor.forget()


def open_quarantine(run: RankRun) -> Quarantine:
    """Return the list of bad samples. It starts with those found when the data was indexed and those in the file of
    rank 0, which alone fetches the file of a remote run. Called by all ranks together."""
    index = run.plan.index
    quarantine = Quarantine(
        run.folder.path / layout.QUARANTINE,
        samples=len(index) + broken(index.bad),
        limit=run.plan.recipe.data.bad_limit,
    )
    quarantine.bad = dist.from_rank_zero(lambda: quarantine.bad)
    quarantine.add(index.bad, write=run.world.rank == 0)
    run.folder.bad = quarantine.bad  # has an entry for each line of the file
    return quarantine
