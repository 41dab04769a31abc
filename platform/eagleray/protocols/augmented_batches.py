"""Read batches of random crops of labelled images, as papers train classifiers on them: torchvision's
RandomResizedCrop and a flip, nothing else.

The crops follow from the seed, the epoch and the sample, and the batches do not depend on the number of ranks."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eagleray.base import cpu_share, dist
from eagleray.base.errors import UserError
from eagleray.config.schedule import Progress
from eagleray.config.view import View
from eagleray.data.batch import Batch
from eagleray.data.index import Index, Note
from eagleray.data.loader import Loader, processes
from eagleray.data.reader import Stream
from eagleray.data.selection import Selection
from eagleray.views.sampling import Views

LANES = 64  # parts of the data that a batch is read from, as in pretraining; fewer where they do not divide it
SAID = 5  # broken images that are named


@dataclass(frozen=True)
class AugmentedBatches:
    """The training batches of some samples of an index, for a number of epochs. Images at the end of an epoch that do
    not fill a batch are left out of it."""

    stream: Stream
    epochs: int
    device: torch.device
    note: Note

    @classmethod
    def of(
        cls,
        index: Index,
        samples: NDArray[np.int64],
        *,
        size: int,
        batch: int,
        epochs: int,
        seed: int,
        device: torch.device,
        note: Note,
    ) -> "AugmentedBatches":
        """Describe the batches of square crops of `size` pixels.

        Raises UserError when the samples do not fill a batch, and when there are more ranks than images in it."""
        if batch > len(samples):
            raise UserError(f"--batch {batch}: more than the {len(samples)} labelled images to train on")
        if dist.size() > batch:
            raise UserError(f"--workers {dist.size()}: expected at most {batch}, the images of a batch")
        weight = np.zeros(len(index), np.float32)
        weight[samples] = 1
        # MoCo v3's and DINO's scripts crop with torchvision's defaults: this scale, bilinear.
        view = View(size=size, scale=(0.08, 1.0), interpolation="bilinear", flip=0.5, jitter=0.0, gray=0.0)
        selection = Selection(weight) if len(samples) < len(index) else None
        stream = Stream(index, Views.of([view]), seed, math.gcd(batch, LANES), batch, selection=selection)
        return cls(stream, epochs, device, note)

    @property
    def steps(self) -> int:
        """The number of steps of all epochs."""
        return self.epochs * self.stream.steps_per_epoch

    def __call__(self, start: int) -> Iterator[tuple[Progress, Batch]]:
        """Yield this rank's rows of each batch from the step `start` on. Images that do not decode are replaced by
        others, and noted.

        Raises UserError or Outage when the images cannot be read."""
        workers = processes("auto", cpu_share.cpus())
        loader = Loader(self.stream, rank=dist.rank(), ranks=dist.size(), workers=workers, device=self.device)
        broken: set[tuple[str, str]] = set()
        for step, (batch, bad) in enumerate(loader.batches(start, self.steps), start):
            for sample in bad:
                if (sample.shard, sample.key) not in broken and len(broken) < SAID:
                    self.note(f"another image replaces {sample.shard}: {sample.key}: {sample.reason}")
                broken.add((sample.shard, sample.key))
            yield Progress(step, self.stream.steps_per_epoch, self.epochs), batch


def class_numbers(index: Index, samples: NDArray[np.int64], device: torch.device) -> Tensor:
    """Return the labels (C,) of the classes of some samples, in ascending order, as labels may be any numbers."""
    return torch.from_numpy(np.unique(index.label[samples])).to(device)
