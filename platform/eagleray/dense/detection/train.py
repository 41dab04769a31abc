"""Train a detector, on images of many sizes, with the same training loop as pretraining."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

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
from eagleray.dense.detection.data import Coco, Example
from eagleray.dense.detection.detectron_parts import Parts
from eagleray.protocols.fine_tuning import Trainee, divide, fine_tune, own
from eagleray.storage.ordered_map import ordered_map

FOLDER = "pipelines/detection"
THREADS = 8  # number of threads that read and decode images

# The folder of a training is named after a digest of its settings that are not at their defaults. So a training can be
# continued by a later version with more settings.


@validated_dataclass(frozen=True, kw_only=True, config=STRICT)
class DetectionSchedule:
    """The settings of a detector's training, which are the keys of the files in pipelines/detection."""

    cascade: bool = False  # whether there are three stages of heads instead of one
    head: Literal["fpn", "c4"] = "fpn"  # fpn: heads on a feature pyramid; c4: a ResNet's last stage is the head
    convolutions: bool = False  # box heads with four convolutions, GIoU loss and, in cascades, offsets per class
    parts: Parts = "torchvision"  # library whose regions and box losses are used; mmdetection has those of detectron2
    frozen: bool = False  # whether a ResNet's stem, first stage and batch norm are not trained
    epochs: PositiveInt | PositiveFloat = 12
    batch: PositiveInt = 16
    lr: Schedule = Schedule(value=1e-4, warmup_from=1e-7, warmup=0.14, drops=(8, 11))
    optimizer: Literal["adamw", "sgd"] = "adamw"  # sgd: with momentum 0.9
    weight_decay: float = 0.05
    drop_path: Share = 0.05
    sizes: tuple[PositiveInt, ...] = (800,)  # short sides in pixels: training draws one, tests take the last
    longest: PositiveInt = 1333  # longest side of an image in pixels
    crop: bool = False  # whether half of the training images are cropped before resizing, as in DETR
    channels: PositiveInt = 256  # number of channels of the pyramid's maps
    regions: PositiveInt = 512  # number of regions of an image that enter the loss
    anchor: PositiveFloat = 8.0  # width of an anchor in cells
    seed: NonNegativeInt = 0

    def __post_init__(self) -> None:
        if self.cascade and self.head == "c4":
            raise ValueError("cascade=true: expected head=fpn, as a cascade has no C4 head here")
        if self.convolutions and self.head == "c4":
            raise ValueError("convolutions=true: expected head=fpn, as the C4 head is the last stage of a ResNet")

    def steps(self, per_epoch: int) -> int:
        """Return the number of steps of a training with `per_epoch` steps in each epoch."""
        return int(per_epoch * self.epochs)


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
    rows: tuple[int, ...]  # number of images of each rank


class Learner(Trainee):
    """A torchvision detector with the interface that the training loop expects."""

    def __init__(self, net: nn.Module, seed: int) -> None:
        super().__init__()
        self.net, self.seed = net, seed

    def forward(self, batch: Batch, at: Progress) -> dict[str, Tensor]:
        """Return the loss and its parts, means over the regions that this rank has sampled, as in mmdetection."""
        device = next(self.parameters()).device
        if len(batch.rows) > 1:
            transform: Any = self.net.transform
            sizes = draw_sizes(transform.min_size, (self.seed, at.step, 0), sum(batch.rows))
            upcoming = iter([sizes[row] for row in own(batch.rows)])
            transform.torch_choice = lambda _: next(upcoming)  # replaces torchvision's random choice of a size
        images = [x.image.to(device).float() / 255 for x in batch.examples]
        losses = self.net(images, [{k: v.to(device) for k, v in x.target.items()} for x in batch.examples])
        return {"loss": torch.stack(list(losses.values())).sum(), **losses}


def draw_sizes(sizes: Sequence[int], seed: tuple[int, ...], count: int) -> list[int]:
    """Draw the short side of each of the `count` images of a global batch, as torchvision does in one process."""
    generator = torch.Generator().manual_seed(hash(seed) & 0x7FFFFFFF)
    return [sizes[int(torch.empty(1).uniform_(0.0, float(len(sizes)), generator=generator))] for _ in range(count)]


def fit(net: nn.Module, data: Coco, settings: DetectionSchedule, folder: str, scratch: Path, note: Note) -> None:
    """Train the detector in place, continuing from the newest checkpoint in the folder if there is one.

    `folder` and `scratch` are those of `fine_tune`."""
    images = data.trainable()
    batch = min(settings.batch, len(images))
    data = dataclasses.replace(data, flip=True, crop=settings.seed if settings.crop else None)
    rows = divide(batch)
    fine_tune(
        "detection",
        Learner(net, settings.seed),
        lambda start: batches(data, images, settings, rows, start),
        algorithm=settings.optimizer,
        steps=settings.steps(len(images) // batch),
        batch=batch,
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        seed=settings.seed,
        folder=folder,
        scratch=scratch,
        note=note,
    )


def batches(
    data: Coco, images: Sequence[int], settings: DetectionSchedule, rows: tuple[int, ...], start: int
) -> Iterator[tuple[Progress, Batch]]:
    """Yield this rank's part of each training batch from step `start` on. `rows` are the numbers of images of all
    ranks.

    Every epoch visits the images in a new order, and leaves out the last ones if they do not fill a batch. Threads read
    the images of the next steps in the background."""
    batch, mine = sum(rows), own(rows)
    steps = len(images) // batch

    def order() -> Iterator[tuple[int, int]]:
        for epoch in range(start // steps, math.ceil(settings.epochs)):
            each = np.random.default_rng((settings.seed, epoch)).permutation(images)[: steps * batch]
            first = start % steps if epoch == start // steps else 0
            yield from ((int(i), epoch) for i in each.reshape(-1, batch)[first:, mine.start : mine.stop].flat)

    examples = ordered_map(data.__getitem__, order(), width=max(THREADS, 2 * len(mine)))
    for step in range(start, settings.steps(steps)):
        yield Progress(step, steps, settings.epochs), Batch(list(itertools.islice(examples, len(mine))), rows)
