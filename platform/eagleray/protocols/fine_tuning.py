"""Fine-tune a backbone within a larger network, or with a classifier on it, on one rank or several.

Each rank takes some rows of a global batch, so that global batches do not depend on the number of ranks. Gradients are
averaged over ranks, and batch norm is synchronised, as with mmsegmentation's SyncBN and in XCiT's detectors. Each rank
draws its own dropout and drop path. Rank 0 writes checkpoints, from which any number of ranks can continue."""

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from timm.layers import DropPath, PatchDropout, calculate_drop_path_rates
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
SILENCE = 60.0, 0.1  # longest time between lines: 60 seconds, or 10 % of the time so far if that is more
SAVE_SECONDS = 300.0  # seconds between checkpoints
DROP_PATHS = ("drop_path", "drop_path1", "drop_path2")  # names of drop path modules in timm's blocks


class Trainee(nn.Module):
    """A network that `loop.Trainer` can train; it has no momentum teacher that a step would have to update."""

    def before_step(self, at: Progress) -> None:
        pass

    after_step = before_step


def set_drop_path(model: nn.Module, rate: float) -> float:
    """Set the rates of stochastic depth (Huang et al. 2016, arXiv:1603.09382) of a model's blocks in place.

    The rates rise linearly from 0 for the first block to `rate` for the last. Returns the rate of the last block, or 0
    if the model has no drop path modules. A model that pretraining has shown some of the patches now sees all."""
    blocks: list[tuple[nn.Module, list[str]]] = []
    for block in model.modules():
        names = [name for name, part in block.named_children() if name in DROP_PATHS or isinstance(part, DropPath)]
        blocks += [(block, names)] if names else []
        if isinstance(block, PatchDropout):
            block.prob = 0.0
    rates = calculate_drop_path_rates(rate, len(blocks)) if blocks else []
    for (block, names), share in zip(blocks, rates, strict=True):
        for name in names:
            setattr(block, name, DropPath(share) if share else nn.Identity())  # type: ignore[arg-type]
    return rate if blocks else 0.0


def divide(batch: int) -> tuple[int, ...]:
    """Return the number of rows of a batch that each rank takes, in the order of ranks.

    Raises UserError when the batch has fewer rows than there are ranks."""
    ranks = dist.size()
    if batch < ranks:
        raise UserError(f"--workers {ranks}: expected at most {batch}, the images of a batch")
    return tuple(batch // ranks + (rank < batch % ranks) for rank in range(ranks))


def read_beforehand(read: Callable[[T], object], things: Sequence[T]) -> None:
    """Read the files of a validation, `things`, with `read` before the training, so that a broken file is found in
    time.

    Each rank reads a part of them. If `read` raises an error on one rank, all ranks raise it."""
    mine = itertools.islice(things, dist.rank(), None, dist.size())
    dist.together(lambda: deque(ordered_map(read, mine), maxlen=0))


def own(rows: tuple[int, ...]) -> range:
    """Return the range of this rank's rows in a global batch. `rows` are the numbers of rows of all ranks."""
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
    """Train a network in place, continuing from the newest checkpoint in `folder` if there is one.

    `algorithm` is a name that `optim.make` knows. `batches(start)` returns the batches from the step `start` on; each
    has `batch` images on all ranks together. `folder` may be an s3:// URL; then `scratch` is a local folder for the
    files to upload and download. Called by all ranks together. Raises UserError when the checkpoints or the data cannot
    be read."""
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
    """Return the mean loss over a global batch, from the mean over this rank's rows. `rows` are those of all ranks."""
    return dist.total(loss * (rows[dist.rank()] / sum(rows)))


class ProgressReport:
    """Prints the step, loss, speed and remaining time of a training at intervals."""

    def __init__(self, name: str, steps: int, start: int, batch: int, note: Note) -> None:
        self.name, self.steps, self.start, self.batch, self.note = name, steps, start, batch, note
        self.began = self.last = time.monotonic()

    def __call__(self, done: int, loss: Tensor) -> None:
        """Print a line after `done` steps if a line is due by LINES or by SILENCE."""
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
