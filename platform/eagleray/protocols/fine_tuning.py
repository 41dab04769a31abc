"""Training a backbone as part of a larger network: what detection and segmentation have in common."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from eagleray.config.schedule import Progress
from eagleray.data.index import Note
from eagleray.engine import checkpoint, loop, optim

LINES = 20  # about training
SILENT = 60.0, 0.1  # another one after so many seconds, or this share of the time so far, without any
SAVED = 300.0  # seconds between checkpoints


class Tuned(nn.Module):
    """A network as `train.fit` wants it; only its parameters move."""

    def before_step(self, at: Progress) -> None:
        pass

    after_step = before_step


def fine_tune(
    name: str,
    net: Tuned,
    batches: Callable[[int], Iterable[tuple[Progress, Any]]],
    *,
    steps: int,
    batch: int,
    lr: Callable[[Progress], float],
    weight_decay: float,
    seed: int,
    folder: Path,
    note: Note,
) -> None:
    """Train in place with AdamW on `batches` of so many images, which begin at a given step; from the newest checkpoint
    in the folder on. Raises UserError."""
    optimizer = optim.make("adamw", net, decay="timm")
    start = 0
    if state := checkpoint.newest(folder):
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        start = int(state["step"])
        note(f"{name}: goes on after step {start} of {steps}")
    taken = loop.fit(
        cast(Any, net),  # which is no method of pretraining, and has what training needs of one
        batches(start),
        optimizer,
        lr=lr,
        weight_decay=lambda _: weight_decay,
        seed=seed,
    )
    ticker, writer, saved = Ticker(name, steps, start, batch, note), checkpoint.Writer(folder, keep=1), time.monotonic()
    try:
        for step in taken:
            done = step.at.step + 1
            ticker(done, step.values["loss"])
            if done == steps or time.monotonic() - saved > SAVED:
                writer.save(done, {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": done})
                saved = time.monotonic()
    finally:
        writer.wait()
    writer.settle()


class Ticker:
    """Says now and then how far training has come."""

    def __init__(self, name: str, steps: int, start: int, batch: int, note: Note) -> None:
        self.name, self.steps, self.start, self.batch, self.note = name, steps, start, batch, note
        self.began = self.told = time.monotonic()

    def __call__(self, done: int, loss: Tensor) -> None:
        now = time.monotonic()
        least, share = SILENT
        due = done * LINES // self.steps > (done - 1) * LINES // self.steps
        if due or now - self.told > max(least, share * (now - self.began)):
            each = (now - self.began) / (done - self.start)
            self.told = now
            self.note(
                f"{self.name}: step {done}/{self.steps} ({done / self.steps:.0%})  loss {float(loss):.3f}  "
                f"{self.batch / each:.1f} images/s  ETA {(self.steps - done) * each:.0f} s"
            )
