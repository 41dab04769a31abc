"""Fine-tune a backbone as part of a larger network, or a classifier on it, on one rank or several.

The global batches do not depend on the number of ranks: each rank takes some of their rows. Gradients are averaged and
batch norm is synchronised over ranks, as with mmsegmentation's SyncBN and in XCiT's detectors; dropout and drop path
are drawn on each rank. Rank 0 writes the checkpoints, from which any number of ranks continues.
"""

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from timm.layers import DropPath, calculate_drop_path_rates
from torch import Tensor, nn

from eagleray.base import dist
from eagleray.base.errors import UserError
from eagleray.base.progress import seconds_left
from eagleray.config.schedule import Progress
from eagleray.data.index import Note
from eagleray.engine import checkpoint, loop, optim
from eagleray.engine.precision import Precision
from eagleray.engine.world import World
from eagleray.storage.ordered_map import ordered_map

T = TypeVar("T")
LINES = 20  # number of evenly spaced progress lines of a training
SILENCE = 60.0, 0.1  # longest time between lines: the larger of these seconds and this share of the time so far
SAVE_SECONDS = 300.0  # seconds between checkpoints
DROP_PATHS = ("drop_path", "drop_path1", "drop_path2")  # names of drop path modules in timm's blocks


class Trainee(nn.Module):
    """A network that `loop.Trainer` can train, without a momentum teacher to update after a step."""

    def before_step(self, at: Progress) -> None:
        pass

    after_step = before_step


def set_drop_path(model: nn.Module, rate: float) -> float:
    """Set the rates of stochastic depth (Huang et al. 2016, arXiv:1603.09382) of a model in place.

    They rise linearly from 0 at the first block to `rate` at the last. Returns the rate of the last block, or 0 for a
    model without drop path modules."""
    blocks: list[tuple[nn.Module, list[str]]] = []
    for block in model.modules():
        names = [name for name, part in block.named_children() if name in DROP_PATHS or isinstance(part, DropPath)]
        blocks += [(block, names)] if names else []
    rates = calculate_drop_path_rates(rate, len(blocks)) if blocks else []
    for (block, names), share in zip(blocks, rates, strict=True):
        for name in names:
            setattr(block, name, DropPath(share) if share else nn.Identity())  # type: ignore[arg-type]
    return rate if blocks else 0.0


def divide(batch: int) -> tuple[int, ...]:
    """Return how many rows of a batch each rank takes, in rank order.

    Raises UserError when the batch has fewer rows than there are ranks."""
    ranks = dist.size()
    if batch < ranks:
        raise UserError(f"--workers {ranks}: expected at most {batch}, the images of a batch")
    return tuple(batch // ranks + (rank < batch % ranks) for rank in range(ranks))


def read_beforehand(read: Callable[[T], object], things: Sequence[T]) -> None:
    """Read all files of a validation before the training, so that no broken file is found only after it.

    Each rank reads a part of `things`. If `read` raises an error, all ranks raise it."""
    mine = itertools.islice(things, dist.rank(), None, dist.size())
    dist.together(lambda: deque(ordered_map(read, mine), maxlen=0))


def own(rows: tuple[int, ...]) -> range:
    """Return which rows of a global batch are this rank's; `rows` has the number of rows of each rank."""
    first = dist.offset(rows)
    return range(first, first + rows[dist.rank()])


def fine_tune(
    name: str,
    net: Trainee,
    batches: Callable[[int], Iterable[tuple[Progress, Any]]],
    *,
    algorithm: str = "adamw",
    steps: int,
    batch: int,
    lr: Callable[[Progress], float],
    weight_decay: float,
    seed: int,
    folder: str,
    scratch: Path,
    note: Note,
) -> None:
    """Train a network in place, continuing from the newest checkpoint in the folder if there is one.

    `algorithm` is one of the names of `optim.make`. `batches` is a function that returns the batches from a step on;
    each has `batch` images on all ranks together. The folder may be an s3:// URL; then `scratch` is a local folder for
    files that are uploaded or downloaded. Called by all ranks together. Raises UserError when the checkpoints or the
    data cannot be read."""
    device = next(net.parameters()).device
    world = World(device)
    world.synchronise(net)
    optimizer = optim.make(algorithm, net, decay="timm")
    precision = Precision.of("auto", device)
    start = 0
    if state := dist.from_rank_zero(lambda: checkpoint.newest(folder, scratch)):
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        precision.load_state_dict(state.get("precision", {}))
        start = int(state["step"])
        note(f"{name}: continues after step {start} of {steps}")
    trainer = loop.Trainer(
        cast(Any, net),
        optimizer,
        lr=lr,
        weight_decay=lambda _: weight_decay,
        seed=seed,
        wrap=lambda method: world.wrap(method, unused=True),
        precision=precision,
    )
    report, writer = ProgressReport(name, steps, start, batch, note), checkpoint.Writer(folder, keep=1, scratch=scratch)
    last_save = time.monotonic()
    try:
        for step in trainer.steps(batches(start)):
            done = step.at.step + 1
            report(done, mean_loss(step.values["loss"], step.batch.rows))
            if world.rank == 0 and (done == steps or time.monotonic() - last_save > SAVE_SECONDS):
                parts = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
                writer.save(done, {"step": done, "precision": precision.state_dict()} | parts)
                last_save = time.monotonic()
    finally:
        writer.wait()
    writer.settle()


def mean_loss(loss: Tensor, rows: tuple[int, ...]) -> Tensor:
    """Return the loss of the global batch, from the loss of this rank's rows."""
    return dist.total(loss * (rows[dist.rank()] / sum(rows)))


class ProgressReport:
    """Report the step, loss, speed and remaining time of a training at intervals."""

    def __init__(self, name: str, steps: int, start: int, batch: int, note: Note) -> None:
        self.name, self.steps, self.start, self.batch, self.note = name, steps, start, batch, note
        self.began = self.last = time.monotonic()

    def __call__(self, done: int, loss: Tensor) -> None:
        """Print a line after `done` steps if it is time for one: see LINES and SILENCE."""
        now = time.monotonic()
        least, share = SILENCE
        due = done * LINES // self.steps > (done - 1) * LINES // self.steps
        if due or now - self.last > max(least, share * (now - self.began)):
            each = (now - self.began) / (done - self.start)
            self.last = now
            left = seconds_left(done, self.steps, start=self.start, seconds=now - self.began)
            self.note(
                f"{self.name}: step {done}/{self.steps} ({done / self.steps:.0%})  loss {float(loss):.3f}  "
                f"{self.batch / each:.1f} images/s  ETA {left:.0f} s"
            )
