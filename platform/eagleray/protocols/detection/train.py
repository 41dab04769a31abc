"""Training a detector: a recipe's loop, on images of many sizes."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass as checked
from torch import Tensor, nn

from eagleray import config
from eagleray.base.errors import UserError
from eagleray.config import STRICT, bundled
from eagleray.config.schedule import Progress, Schedule
from eagleray.config.types import Share
from eagleray.data.index import Note
from eagleray.protocols.detection.data import Coco, Example
from eagleray.protocols.fine_tuning import Trainee, fine_tune
from eagleray.storage.ordered_map import ahead

FOLDER = "pipelines/detection"
THREADS = 8  # that read and decode


@checked(frozen=True, kw_only=True, config=STRICT)
class Schedules:
    """A file of pipelines/detection."""

    cascade: bool = False  # three stages of heads, not one
    epochs: PositiveInt = 12
    batch: PositiveInt = 16
    lr: Schedule = Schedule(value=1e-4, warmup_from=1e-7, warmup=0.14, drops=(8, 11))
    weight_decay: float = 0.05
    drop_path: Share = 0.05
    sizes: tuple[PositiveInt, ...] = (800,)  # of the short side, pixels: one is drawn in training, the last one tests
    longest: PositiveInt = 1333  # of the long side
    channels: PositiveInt = 256  # of the maps of the pyramid
    regions: PositiveInt = 512  # of an image that are learnt from
    anchor: PositiveFloat = 8.0  # cells that an anchor is wide
    seed: NonNegativeInt = 0


def named(name: str) -> Schedules:
    """That of a file, or of a bundled name such as 1x. Raises UserError."""
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        known = sorted(p.stem for p in bundled.folder(FOLDER).glob("*.yaml"))
        if name not in known:
            raise UserError(f"--schedule {name}: no such schedule of detection{config.nearest(name, known)}")
        path = bundled.folder(FOLDER) / f"{name}.yaml"
    return config.load(Schedules, path)


@dataclass(frozen=True, slots=True)
class Batch:
    examples: Sequence[Example]
    rows: tuple[int, ...]  # images of every rank


class Learner(Trainee):
    """A torchvision detector."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, batch: Batch, at: Progress) -> dict[str, Tensor]:
        device = next(self.parameters()).device
        images = [x.image.to(device).float() / 255 for x in batch.examples]
        losses = self.net(images, [{k: v.to(device) for k, v in x.target.items()} for x in batch.examples])
        return {"loss": torch.stack(list(losses.values())).sum(), **losses}


def fit(net: nn.Module, data: Coco, how: Schedules, folder: Path, note: Note) -> None:
    """Train in place, from the newest checkpoint in the folder on."""
    places = data.learnable()
    batch, data = min(how.batch, len(places)), dataclasses.replace(data, flip=True)
    fine_tune(
        "detection",
        Learner(net),
        lambda start: batches(data, places, how, batch, start),
        steps=len(places) // batch * how.epochs,
        batch=batch,
        lr=how.lr,
        weight_decay=how.weight_decay,
        seed=how.seed,
        folder=folder,
        note=note,
    )


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
