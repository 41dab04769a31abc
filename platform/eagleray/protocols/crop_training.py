"""Train classifiers on random crops of labelled images, as papers do, and test them on centre crops.

The random crops are torchvision's RandomResizedCrop and a flip, nothing else. They depend on the seed, the epoch and
the sample, so that the batches do not depend on the number of ranks. The centre crops are divided among the ranks.

For semi-supervised learning, either equally many labelled images of each class are drawn by the seed, as Chen et al.
2020 (SimCLR, arXiv:2002.05709, section 6) draw 1 % and 10 % of ImageNet, or a file names the images, such as SimCLR's
lists. In shapes, H is the number of classifiers, C of classes and D of features."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eagleray.base import cpu_share, dist
from eagleray.base.errors import UserError, explained
from eagleray.config.schedule import Progress
from eagleray.config.view import View
from eagleray.data.batch import Batch
from eagleray.data.index import Index, Note
from eagleray.data.loader import Loader
from eagleray.data.loader_processes import processes
from eagleray.data.reader import Stream
from eagleray.data.selection import Selection
from eagleray.models.backbone import Backbone
from eagleray.protocols.features import LabelledFeatures, extract_features
from eagleray.protocols.image_batches import BATCH, Reading
from eagleray.protocols.probes import ProbeSets
from eagleray.storage import store
from eagleray.views.sampling import Views

LANES = 64  # parts of the data that equally fill a batch, as in pretraining; fewer if the batch is no multiple of 64
SAID = 5  # largest number of broken images that are reported
TOP = 5  # number of guesses in top-5 accuracy


@dataclass(frozen=True)
class AugmentedBatches:
    """The training batches of some of an index's samples, over a number of epochs.

    In each epoch, the last images that do not fill a batch are left out."""

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
        """Return the batches of square crops of `size` pixels, with `batch` images on all ranks together.

        Raises UserError when the samples do not fill a batch, and when there are more ranks than images in a batch."""
        if batch > len(samples):
            raise UserError(f"--batch {batch}: more than the {len(samples)} labelled images to train on")
        if dist.size() > batch:
            raise UserError(f"--workers {dist.size()}: expected at most {batch}, the images of a batch")
        weight = np.zeros(len(index), np.float32)
        weight[samples] = 1
        # As in MoCo v3's and DINO's scripts, crops have torchvision's default scale and interpolation.
        view = View(size=size, scale=(0.08, 1.0), interpolation="bilinear", flip=0.5, jitter=0.0, gray=0.0)
        selection = Selection(weight) if len(samples) < len(index) else None
        stream = Stream(index, Views.of([view]), seed, math.gcd(batch, LANES), batch, selection=selection)
        return cls(stream, epochs, device, note)

    @property
    def steps(self) -> int:
        """The number of steps of all epochs."""
        return self.epochs * self.stream.steps_per_epoch

    def __call__(self, start: int) -> Iterator[tuple[Progress, Batch]]:
        """Yield the progress and this rank's rows of each batch, from the step `start` on.

        An image that does not decode is replaced by another image and reported. Raises UserError or Outage when the
        images cannot be read."""
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
    """Return the distinct labels (C,) of some samples, ascending, on a device. Labels need not be consecutive."""
    return torch.from_numpy(np.unique(index.label[samples])).to(device)


def centre_crops(
    backbone: Backbone, classes: Tensor, index: Index, samples: NDArray[np.int64], *, size: int, resize: int, kind: str
) -> LabelledFeatures:
    """Return features and classes of the centre crops of this rank's share of the samples, on the device of `classes`.

    `classes` (C,) are all labels in ascending order; the class of an image is the index of its label there. Called by
    all ranks together. Raises UserError when no image decodes."""
    reading = Reading.beside(classes.device)
    x, y = extract_features(backbone, index, samples, size=size, resize=resize, kinds=[kind], reading=reading)[kind]
    if not count_images(y):
        raise UserError(f"{index.shards[0].url}: none of the labelled images in this shard and those beside it decodes")
    return LabelledFeatures(x.to(classes.device), torch.searchsorted(classes, y.to(classes.device)))


@torch.no_grad()
def top_accuracies(scores: Callable[[Tensor], Tensor], features: LabelledFeatures, heads: int) -> Tensor:
    """Return the top-1 and top-5 accuracies (H, 2) of H = `heads` classifiers in percent, on the features of all ranks.

    `scores` returns the class scores (b, H, C) of features (b, D). Called by all ranks together."""
    hits = torch.zeros(heads, 2, dtype=torch.long, device=features.x.device)
    for x, y in zip(features.x.split(BATCH), features.y.split(BATCH), strict=True):
        z = scores(x)
        hit = z.topk(min(TOP, z.shape[2])).indices == y.view(-1, 1, 1)  # (b, H, 5) whether a guess is right
        hits += torch.stack([hit[..., 0].sum(0), hit.sum((0, 2))], 1)
    return 100 * dist.total(hits).float() / count_images(features.y)


def count_images(y: Tensor) -> int:
    """Return how many images decoded, on all ranks. y (n,) are the classes of this rank's. Called by all ranks."""
    return sum(dist.gather_objects(len(y)))


def without_trivial(numbers: dict[str, float], classes: int, note: Note) -> dict[str, float]:
    """Return the numbers; if there are fewer than five classes, without top-5 accuracies, which would be 100 %."""
    if classes >= TOP:
        return numbers
    note(f"no top-5 accuracy: {classes} classes")
    return {name: value for name, value in numbers.items() if "top5" not in name}


def choose(sets: ProbeSets, labels: float | str, seed: int) -> ProbeSets:
    """Return the sets with only a part of the training images. `labels` is their share or a file that lists their keys.

    Raises UserError when the share or the file cannot be used, and when a class is left without an image."""
    if isinstance(labels, str):
        chosen = listed(sets.train, sets.train_samples, labels)
    elif labels == 1:
        return sets
    elif 0 < labels < 1:
        chosen = balanced(sets.train.label, sets.train_samples, labels, seed)
    else:
        raise UserError(f"--labels {labels:g}: expected a share above 0 and at most 1, or a file with keys of images")
    out = replace(sets, train_samples=chosen)
    out.check()
    return out


def balanced(label: NDArray[np.int64], samples: NDArray[np.int64], share: float, seed: int) -> NDArray[np.int64]:
    """Draw a share of the samples at random, and return them in ascending order.

    Each class gets the same number, and some get one more; a class with fewer samples keeps them all. `label` (N,) are
    the classes of all N samples of the index. Raises UserError when the share is less than one image of each class."""
    classes, of = np.unique(label[samples], return_inverse=True)
    total = round(share * len(samples))
    if total < len(classes):
        raise UserError(
            f"--labels {share:g}: {total} of {len(samples)} images for {len(classes)} classes; expected one of each"
        )
    rng = np.random.default_rng(seed)
    wanted = np.full(len(classes), total // len(classes))
    wanted[rng.permutation(len(classes))[: total % len(classes)]] += 1
    shuffled = rng.permutation(len(samples))
    by_class = shuffled[np.argsort(of[shuffled], kind="stable")]
    first = np.cumsum(np.bincount(of)) - np.bincount(of)
    position = np.arange(len(samples)) - first[of[by_class]]  # position of each sample within its class
    return np.sort(samples[by_class[position < wanted[of[by_class]]]])


def listed(index: Index, samples: NDArray[np.int64], url: str) -> NDArray[np.int64]:
    """Return the samples whose keys are in a text file at `url`, one in each line, with or without folders.

    Extensions, which begin at the first dot of a file name, are ignored. Raises UserError when the file cannot be read,
    or when a line does not name exactly one of the samples."""
    no_file = f"--labels {url}: no such file; expected a share of the labels or a file with keys"
    no_text = f"--labels {url}: not a text file; expected one key of an image in each line"
    with explained(no_file, FileNotFoundError, why=False), explained(no_text, UnicodeDecodeError, why=False):
        lines = store.store(url).get(store.absolute(url)).decode().split("\n")
    names = {without_extension(line.strip()) for line in lines} - {""}
    keys = [without_extension(key) for key in index.keys(0, len(index))]
    may = np.zeros(len(index), bool)
    may[samples] = True
    found = [(n, k if k in names else k.rpartition("/")[2]) for n, k in enumerate(keys) if may[n]]
    found = [(n, name) for n, name in found if name in names]
    if missing := sorted(names - {name for _, name in found}):
        raise UserError(
            f"--labels {url}: {len(missing)} of {len(names)} names are not those of labelled images to train on, such "
            f"as {missing[0]}"
        )
    if len(found) != len(names) or not names:
        raise UserError(f"--labels {url}: {len(names)} names for {len(found)} images; expected one image for each")
    return np.array([n for n, _ in found])


def without_extension(name: str) -> str:
    """Return a path without its extension, which begins at the first dot of the file name."""
    folder, slash, last = name.rpartition("/")
    return folder + slash + last.partition(".")[0]
