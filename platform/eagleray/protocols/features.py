"""Extract the features of a frozen backbone for the images in shards."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eagleray.base import dist
from eagleray.base.errors import UserError
from eagleray.config.types import Format
from eagleray.data.decode import BadImage, decode
from eagleray.data.index import Index
from eagleray.engine.precision import autocast
from eagleray.models.backbone import Backbone
from eagleray.protocols.digests import digest
from eagleray.protocols.eval_mode import in_eval_mode
from eagleray.protocols.feature_shards import own_samples
from eagleray.protocols.feature_types import read
from eagleray.protocols.image_batches import THREADS, Reading, batches
from eagleray.protocols.settings import Bank
from eagleray.views.crop import centre_crop
from eagleray.views.photometric import normalise

FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}


class LabelledFeatures(NamedTuple):
    """Features and classes of n images."""

    x: Tensor  # (n, D) features, not normalised
    y: Tensor  # (n,) classes


class Extracted(NamedTuple):
    """The features of a training and a test set, those of this rank's share or all of them."""

    train: LabelledFeatures
    test: LabelledFeatures
    images: tuple[int, int]  # numbers of both sets on all ranks


@dataclass(frozen=True)
class FrozenFeatures:
    """Frozen features of labelled images, which are extracted when they are first read."""

    extract: Callable[[], Extracted]
    digest: str = ""  # a digest of the images and their labels
    bank: Bank = "fp32"  # the format in which they are kept

    @cached_property
    def _extracted(self) -> Extracted:
        return self.extract()

    @property
    def train(self) -> LabelledFeatures:
        """The features to train on, with classes that are numbered from 0."""
        return self._extracted.train

    @property
    def test(self) -> LabelledFeatures:
        """The features to test on."""
        return self._extracted.test

    @property
    def images(self) -> tuple[int, int]:
        """The numbers of training and of test images, on all ranks."""
        return self._extracted.images


@dataclass(frozen=True)
class SuiteFeatures:
    """Frozen features of many data sets."""

    root: str  # folder or URL of the data sets
    read: Callable[[str], LabelledFeatures]  # extracts the features of the shards at a URL
    model: str = ""  # timm name of the backbone
    digests: list[str] = field(default_factory=list)  # digests of the data sets that were read
    bank: Bank = "fp32"  # the format in which they are kept

    @property
    def digest(self) -> str:
        """The digest of all data sets that were read."""
        return digest(sorted(self.digests))


def extract_pooled(
    backbone: Backbone,
    index: Index,
    samples: NDArray[np.int64],
    *,
    size: int,
    resize: int,
    precision: Format = "auto",
    bank: Bank = "fp32",
    reading: Reading = THREADS,
) -> LabelledFeatures:
    """Extract the pooled features of this rank's share of the samples; see `extract_features`."""
    more: dict[str, Any] = {"precision": precision, "bank": bank, "reading": reading}
    return extract_features(backbone, index, samples, size=size, resize=resize, **more)["pooled"]


@in_eval_mode
def extract_features(
    backbone: Backbone,
    index: Index,
    samples: NDArray[np.int64],
    *,
    size: int,
    resize: int,
    kinds: Sequence[str] = ("pooled",),
    precision: Format = "auto",
    bank: Bank = "fp32",
    reading: Reading = THREADS,
    tick: Callable[[int], None] = lambda _: None,
) -> dict[str, LabelledFeatures]:
    """Extract several types of features of this rank's share of the samples in a single forward pass.

    Images that do not decode are left out. `bank` is the format of the features. After each batch, `tick` is called
    with the number of its images.

    Raises UserError when the backbone lacks one of the types, or when the device does not compute in this precision."""
    mine = own_samples(samples)
    xs: dict[str, Tensor] = {}  # (n, D), of which the first `done` rows are known
    y = torch.empty(len(mine), dtype=torch.long)
    done = 0

    @torch.inference_mode()
    def extract() -> None:
        nonlocal done
        for rows, values in embedded(backbone, index, mine, size, resize, kinds, precision, reading):
            new = slice(done, done + len(rows))
            for kind, value in values.items():
                if kind not in xs:
                    xs[kind] = torch.empty(len(mine), value.shape[1], dtype=FORMATS[bank])
                xs[kind][new] = value
            y[new] = torch.from_numpy(index.label[rows])
            done += len(rows)
            tick(len(rows))

    dist.together(extract)
    widths: dict[str, int] = {}  # also for a rank without images
    for part in dist.gather_objects({kind: x.shape[1] for kind, x in xs.items()}):
        widths |= part
    nothing = {kind: torch.empty(0, widths.get(kind, backbone.dim), dtype=FORMATS[bank]) for kind in kinds}
    return {kind: LabelledFeatures(xs.get(kind, nothing[kind])[:done], y[:done]) for kind in kinds}


def embedded(
    backbone: Backbone,
    index: Index,
    samples: NDArray[np.int64],
    size: int,
    resize: int,
    kinds: Sequence[str],
    precision: Format,
    reading: Reading = THREADS,
) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
    """Yield the numbers of the samples in a batch that decode, and their features (b, D) by type, float32 on the host.
    The caller sets the backbone's mode, and that no gradients are computed."""
    device = next(backbone.parameters()).device
    for rows, images in batches(index, samples, size, resize, reading=reading, device=device):
        x = normalise(images, device)
        with autocast(device, precision):
            values = read(backbone, x, kinds)
        yield rows, {kind: value.float().cpu() for kind, value in values.items()}


def image(index: Index, sample: int, size: int, resize: int) -> Tensor | None:
    """Read the centre crop (3, size, size), uint8, of a sample; return None if the image does not decode."""
    data = index.read(sample, sample + 1)
    try:
        return centre_crop(decode(data, index.channels), resize=resize, size=size)
    except BadImage:
        return None


def labelled_samples(index: Index) -> NDArray[np.int64]:
    """Return the samples that have a label."""
    return np.flatnonzero(index.label >= 0)


def no_image_error(index: Index) -> UserError:
    """Return the error for shards in which no image decodes."""
    return UserError(f"{index.shards[0].url}: no image in this shard decodes, nor in the shards beside it")


def subset(samples: NDArray[np.int64], count: int | None) -> NDArray[np.int64]:
    """Draw at most `count` of the samples at random, and keep their order; every call draws the same ones.

    Taking every n-th sample instead would miss classes if the classes alternate."""
    if count is None or count >= len(samples):
        return samples
    return np.sort(np.random.default_rng(0).choice(samples, count, replace=False))
