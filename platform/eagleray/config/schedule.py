"""Numbers that move over training, as pure functions of progress."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """How far training has come; derived from the step alone, so nothing here is ever checkpointed."""

    step: int
    steps_per_epoch: int
    epochs: int

    @property
    def epoch(self) -> float:
        return self.step / self.steps_per_epoch


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Linear from `warmup_from` to `value` over `warmup` epochs, then half a cosine, or a straight line, to `end`, or a
    tenth at each of `drops`, if given. Raises ValueError for both."""

    value: float
    warmup_from: float = 0.0
    warmup: float = 0.0  # epochs
    end: float | None = None
    drops: tuple[float, ...] = ()  # epochs
    inclusive: bool = False  # the last warm-up step is at `value` already (DINO), not the first after it (MoCo v3)
    per_epoch: bool = False  # moves between epochs only
    straight: bool = False  # to `end` (DRLoc's weight)
    # As timm's scheduler asked after each step (MoBY): a step behind, so the first two are alike, and a cosine counted
    # from the start of training, so `value` is never quite reached.
    timm: bool = False

    def __post_init__(self) -> None:
        if self.drops and self.end is not None:
            raise ValueError(f"drops={list(self.drops)} and end={self.end}: expected one of them")

    def __call__(self, at: Progress) -> float:
        ticks = 1 if self.per_epoch else at.steps_per_epoch  # in one epoch
        now = max((int(at.epoch) if self.per_epoch else at.step) - self.timm, 0)
        warm = self.warmup * ticks
        if now < warm:
            return self.warmup_from + (self.value - self.warmup_from) * now / max(warm - self.inclusive, 1)
        if self.end is None:
            return self.value * 0.1 ** sum(at.epoch >= drop for drop in self.drops)
        begin = 0 if self.timm else warm
        left = max(at.epochs * ticks - begin, 1)
        if self.straight:
            return self.end + (self.value - self.end) * (1 - min(now - begin, left) / left)
        # Multiplied before divided, as in DINO: 1 + cos loses digits near pi, and those that it keeps depend on this.
        return self.end + 0.5 * (self.value - self.end) * (1 + math.cos(math.pi * min(now - begin, left) / left))
