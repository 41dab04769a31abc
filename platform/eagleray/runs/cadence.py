"""Decide when a run writes a record, evaluates its backbone and saves a checkpoint."""

import time

from eagleray.runs.plan import Plan


class Cadence:
    """Decides after every step what is due. Steps are counted from 1; `saved_step` is the step of the last
    checkpoint."""

    def __init__(self, plan: Plan, start: int) -> None:
        recipe = plan.recipe
        self.steps, self.log_steps = plan.steps, recipe.log_steps
        self.evaluation_steps = recipe.evaluate.every * plan.stream.steps_per_epoch  # 0: at the end alone
        self.checkpoint_steps, self.checkpoint_minutes = recipe.checkpoint.steps, recipe.checkpoint.minutes
        self.saved_step, self.saved_time = start, time.monotonic()

    def evaluates(self, step: int) -> bool:
        """Return whether to evaluate the backbone after this step. Not after the last one: the end of a run has its
        own evaluation."""
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
        """Note that a checkpoint of this step was saved, from which the next interval counts."""
        self.saved_step, self.saved_time = step, time.monotonic()
