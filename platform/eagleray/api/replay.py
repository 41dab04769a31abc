"""Take a step of a run again, and compare it with what the run has recorded."""

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from eagleray import config
from eagleray.api.overrides import overrides_of
from eagleray.api.run import Run
from eagleray.base.console import say
from eagleray.base.numbers_given import whole
from eagleray.config import plugins as loading
from eagleray.runs import layout
from eagleray.runs import recipe as recipes

TOLERANCE = 0.01  # relative difference that counts as equal where equal bits cannot be expected


@dataclass(frozen=True)
class Replay:
    """The outcome of a step that was taken again. Printed, it is what `eagleray replay` prints.

    Example:

        again = eagleray.replay("runs/a", 2, from_start=True)
        again.recorded["loss"], again.values["loss"], again.keys
    """

    step: int
    begin: int  # the step of the checkpoint from which steps were taken again; 0: the start of the run
    recorded: dict[str, float]  # loss and gradient norm, as the run has recorded them
    values: dict[str, float]  # the same, taken again
    keys: list[str] = field(repr=False)  # of the images of the batch
    same_batch: bool  # false where skipped.jsonl has the keys of other images
    inexact: list[str]  # why equal bits cannot be expected; empty where they can
    changed: list[str]  # what is not as it was

    @property
    def exact(self) -> bool:
        """Return whether all numbers are equal to the bit."""
        return self.same_batch and all(same(value, self.values[name]) for name, value in self.recorded.items())

    @property
    def equal(self) -> bool:
        """Return whether the step could be repeated: to the bit or, where equal bits cannot be expected, within
        a hundredth."""
        return self.exact or (self.same_batch and bool(self.inexact) and self.difference <= TOLERANCE)

    @property
    def difference(self) -> float:
        """Return the largest difference of a number from the recorded one, relative to that."""
        return max(distance(value, self.values[name]) for name, value in self.recorded.items())

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        verdict = "equal to the bit" if self.exact else "different"
        if self.equal and not self.exact:
            verdict = f"equal but for {self.difference:.1g} of a value; up to {TOLERANCE} may be rounding"
        yield f"step {self.step}: {verdict}"
        yield f"{'':12}{'recorded':24}again"
        for name, value in self.recorded.items():
            yield f"{name:12}{value!r:24}{self.values[name]!r}"
        if not all(map(math.isfinite, self.recorded.values())):
            yield f"{'skipped':12}the gradient was not finite"
        yield f"{'batch':12}{len(self.keys)} images"
        source = f"the checkpoint of step {self.begin}" if self.begin else "the start of the run"
        yield f"{'from':12}{source}, with {self.step - self.begin} step(s)"
        if not self.exact:
            yield from (f"{'rounding':12}{reason}" for reason in self.inexact)
        yield from (f"{'changed':12}{what}" for what in self.changed)


def replay(run: str | Path | Run, step: int, *, from_start: bool = False, plugins: Sequence[str | Path] = ()) -> Replay:
    """Take a step of a run again from the nearest earlier checkpoint, and compare its loss and gradient norm with what
    the run has recorded.

    The run may be finished, stopped or running; nothing in its folder or URL is written. On a CPU, and on the same kind
    of accelerator with `deterministic=true`, the numbers are equal to the bit. A run on several ranks is replayed on as
    many, by Ray. Where no checkpoint of an earlier step is kept, `from_start` takes all steps from the first one again.
    `plugins` are files and modules to load, among them those of the run, which are code and not loaded by themselves.

    Raises UserError when there is no such run, step, checkpoint or data, and Outage when a store stays away.

    Example:

        again = eagleray.replay("runs/a", 2, from_start=True)
        assert again.equal
        print(again)
    """
    step = whole("step", step)
    loading.use(plugins)
    opened = Run(run)
    from eagleray.api import retaken
    from eagleray.runs.replay import Task, take
    from eagleray.runs.step_record import find_record

    record = find_record(opened.folder, step)
    start = record.start
    recipe = recipes.load(str(opened.folder / layout.RECIPE), overrides_of(start.get("keys")), named=True)
    ranks, on = int(start.get("ranks", 1)), str(start.get("device", ""))
    task = Task(
        recipe=config.to_plain(recipe),
        out=opened.out,
        step=step,
        gpus=not on.startswith("cpu") and recipe.gpus is not False and retaken.has_accelerators(ranks),
        threads=start.get("threads"),
        from_start=from_start,
    )
    taken = take(task, say) if ranks == 1 else retaken.on_ranks(task, ranks)
    return Replay(
        step=step,
        begin=taken.begin,
        recorded=record.values,
        values=taken.values,
        keys=taken.keys,
        same_batch=record.skipped in (None, taken.keys),
        inexact=list(retaken.inexact(record, taken)),
        changed=list(retaken.changed(record, taken, opened.folder)),
    )


def distance(a: float, b: float) -> float:
    """Return how far `b` is from `a`, relative to `a`; infinity where one of them is not finite."""
    if same(a, b):
        return 0.0
    return abs(b - a) / abs(a) if a and math.isfinite(a) and math.isfinite(b) else math.inf


def same(a: float, b: float) -> bool:
    """Return whether two numbers are equal to the bit, or both are not a number."""
    return struct.pack("d", a) == struct.pack("d", b) or (math.isnan(a) and math.isnan(b))
