"""Training a detector: a recipe's loop, on images of many sizes."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass as checked
from torch import Tensor, nn

from eagleray import checkpoint, config, optim, train
from eagleray.config import STRICT
from eagleray.data.ahead import ahead
from eagleray.errors import UserError
from eagleray.evals.detection_data import Coco, Example
from eagleray.recipe import Count, Positive, Share, bundled
from eagleray.schedule import Progress, Schedule

PositiveFloat = Annotated[float, Field(gt=0)]
Note = Callable[[str], None]
FOLDER = "pipelines/detection"
THREADS = 8  # that read and decode
LINES = 20  # about training
SECONDS = 60.0  # and another one after so many without any
SAVED = 300.0  # seconds between checkpoints


@checked(frozen=True, kw_only=True, config=STRICT)
class Schedules:
    """A file of pipelines/detection."""

    cascade: bool = False  # three stages of heads, not one
    epochs: Positive = 12
    batch: Positive = 16
    lr: Schedule = Schedule(value=1e-4, warmup_from=1e-7, warmup=0.14, drops=(8, 11))
    weight_decay: float = 0.05
    drop_path: Share = 0.05
    sizes: tuple[Positive, ...] = (800,)  # of the short side, pixels: one is drawn in training, the last one tests
    longest: Positive = 1333  # of the long side
    channels: Positive = 256  # of the maps of the pyramid
    regions: Positive = 512  # of an image that are learnt from
    anchor: PositiveFloat = 8.0  # cells that an anchor is wide
    seed: Count = 0


def named(name: str) -> Schedules:
    """That of a file, or of a bundled name such as 1x. Raises UserError."""
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        known = sorted(p.stem for p in bundled(FOLDER).glob("*.yaml"))
        if name not in known:
            raise UserError(f"--schedule {name}: no such schedule of detection{config.nearest(name, known)}")
        path = bundled(FOLDER) / f"{name}.yaml"
    return config.load(Schedules, path)


@dataclass(frozen=True, slots=True)
class Batch:
    examples: Sequence[Example]
    rows: tuple[int, ...]  # images of every rank


class Learner(nn.Module):
    """A torchvision detector as `train.fit` wants it."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, batch: Batch, at: Progress) -> dict[str, Tensor]:
        device = next(self.parameters()).device
        images = [x.image.to(device).float() / 255 for x in batch.examples]
        losses = self.net(images, [{k: v.to(device) for k, v in x.target.items()} for x in batch.examples])
        return {"loss": torch.stack(list(losses.values())).sum(), **losses}

    def before_step(self, at: Progress) -> None:
        pass

    after_step = before_step


def fit(net: nn.Module, data: Coco, how: Schedules, folder: Path, note: Note) -> None:
    """Train in place, from the newest checkpoint in the folder on."""
    learner, places = Learner(net), data.learnable()
    batch = min(how.batch, len(places))
    total = len(places) // batch * how.epochs
    optimizer = optim.make("adamw", learner, decay="timm")
    start = restore(learner, optimizer, folder)
    if start:
        note(f"detection: goes on after step {start} of {total}")
    data, ticker = dataclasses.replace(data, flip=True), Ticker(total, start, batch, note)
    writer, saved = checkpoint.Writer(folder, keep=1), time.monotonic()
    taken = train.fit(
        cast(Any, learner),
        cast(Any, batches(data, places, how, batch, start)),
        optimizer,
        lr=how.lr,
        weight_decay=Schedule(value=how.weight_decay),
        seed=how.seed,
    )
    try:
        for step in taken:
            done = step.at.step + 1
            ticker(done, step.values)
            if done == total or time.monotonic() - saved > SAVED:
                writer.save(done, {"net": learner.state_dict(), "optimizer": optimizer.state_dict(), "step": done})
                saved = time.monotonic()
    finally:
        writer.wait()
    writer.settle()


def batches(
    data: Coco, places: Sequence[int], how: Schedules, batch: int, start: int
) -> Iterator[tuple[Progress, Batch]]:
    """Every image once an epoch, in another order each, but those that fill no batch; the images of the next steps are
    read meanwhile."""
    steps = len(places) // batch

    def order() -> Iterator[tuple[int, int]]:
        for epoch in range(start // steps, how.epochs):
            each = np.random.default_rng((how.seed, epoch)).permutation(places)[: steps * batch]
            yield from ((int(place), epoch) for place in each)

    wanted = itertools.islice(order(), start % steps * batch, None)
    examples = ahead(data.__getitem__, wanted, width=max(THREADS, 2 * batch))
    for step in range(start, how.epochs * steps):
        yield Progress(step, steps, how.epochs), Batch(list(itertools.islice(examples, batch)), (batch,))


def restore(learner: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> int:
    """The steps that the newest checkpoint has behind it; 0 where there is none."""
    state = checkpoint.newest(folder)
    if state is None:
        return 0
    learner.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


class Ticker:
    """Says now and then how far training has come."""

    def __init__(self, steps: int, start: int, batch: int, note: Note) -> None:
        self.steps, self.start, self.batch, self.note = steps, start, batch, note
        self.began = self.told = time.monotonic()

    def __call__(self, done: int, values: dict[str, Tensor]) -> None:
        now = time.monotonic()
        due = done * LINES // self.steps > (done - 1) * LINES // self.steps
        if due or now - self.told > SECONDS:
            each = (now - self.began) / (done - self.start)
            self.told = now
            self.note(
                f"detection: step {done}/{self.steps} ({done / self.steps:.0%})  loss {float(values['loss']):.3f}  "
                f"{self.batch / each:.1f} images/s  ETA {(self.steps - done) * each:.0f} s"
            )
