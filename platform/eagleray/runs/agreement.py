"""Decide after which steps to log, evaluate and save, and let all ranks agree on every step before they take it."""

import time
from collections.abc import Iterator
from typing import NamedTuple

from eagleray.base import dist
from eagleray.base.errors import Outage, Preempted, UserError
from eagleray.data.batch import Batch
from eagleray.data.quarantine import BadSample, Quarantine
from eagleray.engine.world import World
from eagleray.runs.plan import Plan
from eagleray.runs.run_dir import RunDir

WARNED = 5.0  # seconds between two checks whether a machine is about to be preempted


class Cadence:
    """Decides after every step whether to write a record, to evaluate and to save.
    Steps are counted from 1, and `saved_step` is the step of the last checkpoint."""

    def __init__(self, plan: Plan, start: int) -> None:
        recipe = plan.recipe
        self.steps, self.log_steps = plan.steps, recipe.log_steps
        self.evaluation_steps = recipe.evaluate.every * plan.stream.steps_per_epoch  # 0: only at the end of the run
        self.checkpoint_steps, self.checkpoint_minutes = recipe.checkpoint.steps, recipe.checkpoint.minutes
        self.is_milestone = plan.is_milestone
        self.saved_step, self.saved_time = start, time.monotonic()

    def evaluates(self, step: int) -> bool:
        """Return whether to evaluate the backbone after this step: not after the last, which has its own evaluation."""
        return bool(self.evaluation_steps) and step % self.evaluation_steps == 0 and step < self.steps

    def records(self, step: int) -> bool:
        """Return whether to write a line of metrics.jsonl after this step."""
        return step % self.log_steps == 0 or step == self.steps or self.evaluates(step)

    def saves(self, step: int) -> bool:
        """Return whether a checkpoint is due: after the recipe's number of steps or minutes, whichever comes first."""
        if self.checkpoint_steps and step - self.saved_step >= self.checkpoint_steps:
            return True
        return time.monotonic() - self.saved_time > 60 * self.checkpoint_minutes

    def saved(self, step: int) -> None:
        """Record that a checkpoint of this step was saved. The next interval begins now."""
        self.saved_step, self.saved_time = step, time.monotonic()


class Decision(NamedTuple):
    """The decision of all ranks about the next step."""

    goes_on: bool  # whether the step is taken
    saves: bool  # whether a checkpoint is saved after the step


class Agreement:
    """Lets all ranks decide together, before each step, whether to take it and whether to save afterwards.

    Each rank contributes whether it was asked to stop, how many bad samples it met, and whether it failed. These
    numbers are summed in CPU tensors, so that no rank has to wait for its accelerator."""

    def __init__(self, world: World, folder: RunDir, quarantine: Quarantine, cadence: Cadence) -> None:
        self.world, self.folder, self.quarantine, self.cadence = world, folder, quarantine, cadence
        self.warned = time.monotonic()  # time of the last check whether a machine is about to be taken away
        # The error that ends the steps, the same on all ranks after `decide`.
        self.problem: UserError | Outage | Preempted | None = None

    def next_batch(self, batches: Iterator[tuple[Batch, list[BadSample]]]) -> tuple[Batch | None, list[BadSample]]:
        """Return the next batch and the bad samples met while reading it. The batch is None after the last one, and
        after an error, which is kept in `problem`."""
        try:
            return next(batches, (None, []))
        except (UserError, Outage) as e:
            self.problem = e
            return None, []

    def decide(self, step: int, bad: list[BadSample], *, stop: bool) -> Decision:
        """Return whether all ranks take the step, and whether rank 0 wants to save a checkpoint after it.
        No rank takes it if one has no batch, has failed or was asked to stop. Bad samples of all are quarantined."""
        due = self.cadence.is_milestone(step) or (self.cadence.saves(step) and not self.folder.saving())
        save = self.world.rank == 0 and due
        look = self.world.spot and self.world.rank == 0 and time.monotonic() > self.warned + WARNED
        stops, broken, failed, ask, saves = self.world.agree(
            stop or self.folder.stopping(), len(bad), self.problem is not None, look, save
        )
        if failed:
            self.problem = next(e for e in dist.gather_objects(self.problem) if e)
        if broken:
            found = [b for part in dist.gather_objects(bad) for b in part]
            try:
                self.quarantine.add(found, write=self.world.rank == 0)
            except UserError as e:
                self.problem = e
        if ask:
            self.warned = time.monotonic()
            if self.world.agree(self.world.warned())[0]:
                self.problem = self.problem or Preempted("a machine of this run is about to be taken away or added")
        return Decision(goes_on=not (stops or self.problem), saves=bool(saves))
