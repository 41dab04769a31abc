"""Train a detector, on images of many sizes, with the same training loop as pretraining."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass as validated_dataclass
from torch import Tensor, nn

from eagleray import config
from eagleray.base.errors import UserError
from eagleray.config import STRICT, bundled
from eagleray.config.schedule import Progress, Schedule
from eagleray.config.types import Share
from eagleray.data.index import Note
from eagleray.protocols.detection.data import Coco, Example
from eagleray.protocols.fine_tuning import Trainee, fine_tune
from eagleray.storage.ordered_map import ordered_map

FOLDER = "pipelines/detection"
THREADS = 8  # that read and decode images


@validated_dataclass(frozen=True, kw_only=True, config=STRICT)
class DetectionSchedule:
    """The settings of a detector's training, as in the files of pipelines/detection."""

    cascade: bool = False  # three stages of heads instead of one
    epochs: PositiveInt = 12
    batch: PositiveInt = 16
    lr: Schedule = Schedule(value=1e-4, warmup_from=1e-7, warmup=0.14, drops=(8, 11))
    weight_decay: float = 0.05
    drop_path: Share = 0.05
    sizes: tuple[PositiveInt, ...] = (800,)  # pixels of the short side: drawn in training, the last one to test
    longest: PositiveInt = 1333  # pixels of the long side at most
    channels: PositiveInt = 256  # of the pyramid's maps
    regions: PositiveInt = 512  # of an image in the loss
    anchor: PositiveFloat = 8.0  # width of an anchor in cells
    seed: NonNegativeInt = 0


def load_schedule(name: str) -> DetectionSchedule:
    """Load a training schedule from a file, or a shipped schedule by its name, such as 1x.

    Raises UserError when there is no such schedule, or when one of its keys is wrong."""
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        known = sorted(p.stem for p in bundled.folder(FOLDER).glob("*.yaml"))
        if name not in known:
            raise UserError(f"--schedule {name}: no such detection schedule{config.nearest(name, known)}")
        path = bundled.folder(FOLDER) / f"{name}.yaml"
    return config.load(DetectionSchedule, path)


@dataclass(frozen=True, slots=True)
class Batch:
    """The images of one training step, which may differ in size."""

    examples: Sequence[Example]
    rows: tuple[int, ...]  # images of every rank


class Learner(Trainee):
    """A torchvision detector with the interface that the training loop expects."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, batch: Batch, at: Progress) -> dict[str, Tensor]:
        device = next(self.parameters()).device
        images = [x.image.to(device).float() / 255 for x in batch.examples]
        losses = self.net(images, [{k: v.to(device) for k, v in x.target.items()} for x in batch.examples])
        return {"loss": torch.stack(list(losses.values())).sum(), **losses}


def fit(net: nn.Module, data: Coco, settings: DetectionSchedule, folder: Path, note: Note) -> None:
    """Train the detector in place, continuing from the newest checkpoint in the folder if there is one."""
    images = data.trainable()
    batch, data = min(settings.batch, len(images)), dataclasses.replace(data, flip=True)
    fine_tune(
        "detection",
        Learner(net),
        lambda start: batches(data, images, settings, batch, start),
        steps=len(images) // batch * settings.epochs,
        batch=batch,
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        seed=settings.seed,
        folder=folder,
        note=note,
    )


def batches(
    data: Coco, images: Sequence[int], settings: DetectionSchedule, batch: int, start: int
) -> Iterator[tuple[Progress, Batch]]:
    """Yield the training batches from step `start` on.

    Every epoch visits the images in a new order and leaves out those at its end that do not fill a batch. Threads read
    the images of the next steps in the background."""
    steps = len(images) // batch

    def order() -> Iterator[tuple[int, int]]:
        for epoch in range(start // steps, settings.epochs):
            each = np.random.default_rng((settings.seed, epoch)).permutation(images)[: steps * batch]
            yield from ((int(i), epoch) for i in each)

    upcoming = itertools.islice(order(), start % steps * batch, None)
    examples = ordered_map(data.__getitem__, upcoming, width=max(THREADS, 2 * batch))
    for step in range(start, settings.epochs * steps):
        yield Progress(step, steps, settings.epochs), Batch(list(itertools.islice(examples, batch)), (batch,))
