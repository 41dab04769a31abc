"""Schedules of learning rates, momenta and temperatures, as pure functions of the training progress."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """The position of a step in training. The step and the recipe determine it, so no checkpoint stores it."""

    step: int
    steps_per_epoch: int
    epochs: float
    seed: int = 0  # seed of the recipe

    @property
    def epoch(self) -> float:
        return self.step / self.steps_per_epoch

    @property
    def draw(self) -> int:
        """The seed for a method's random numbers in this step. Every rank has the same seed.

        If the recipe's seed is 0, `draw` is the number of the step."""
        return hash((self.seed, self.step)) & 0x7FFFFFFF if self.seed else self.step


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """A schedule of a value: a linear warm-up from `warmup_from` to `value` over `warmup` epochs, then a decay.

    If `end` is set, the value moves to `end` after the warm-up, along half a cosine or, if `straight` is true, along a
    straight line. If `drops` is set, the value is divided by ten at each of these epochs. Raises ValueError if both
    `end` and `drops` are set."""

    value: float
    warmup_from: float = 0.0
    warmup: float = 0.0  # epochs
    end: float | None = None
    drops: tuple[float, ...] = ()  # epochs
    inclusive: bool = False  # the last warm-up step has `value` already (DINO), not the first after it (MoCo v3)
    per_epoch: bool = False  # the value changes between epochs only
    straight: bool = False  # a straight line to `end` instead of a cosine (DRLoc's weight)
    # Follow timm's scheduler, which MoBY calls after each step: values lag by one step, so the first two are equal, and
    # the cosine starts at step 0 instead of after the warm-up, so `value` is never quite reached.
    timm: bool = False

    def __post_init__(self) -> None:
        if self.drops and self.end is not None:
            raise ValueError(f"drops={list(self.drops)} and end={self.end}: expected only one of them")

    def __call__(self, at: Progress) -> float:
        ticks = 1 if self.per_epoch else at.steps_per_epoch  # number of times per epoch that the value changes
        now = max((int(at.epoch) if self.per_epoch else at.step) - self.timm, 0)
        warm = self.warmup * ticks
        if now < warm:
            return self.warmup_from + (self.value - self.warmup_from) * now / max(warm - self.inclusive, now, 1)
        if self.end is None:
            return self.value * 0.1 ** sum(at.epoch >= drop for drop in self.drops)
        begin = 0 if self.timm else warm
        left = max(at.epochs * ticks - begin, 1)
        if self.straight:
            return self.end + (self.value - self.end) * (1 - min(now - begin, left) / left)
        # Multiply before dividing, as DINO does: near pi, 1 + cos loses digits, so the order changes the result.
        return self.end + 0.5 * (self.value - self.end) * (1 + math.cos(math.pi * min(now - begin, left) / left))
