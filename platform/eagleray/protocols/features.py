"""Extract the features of a frozen backbone for the images in shards."""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

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
from eagleray.protocols.eval_mode import in_eval_mode
from eagleray.protocols.feature_types import read
from eagleray.views.crop import centre_crop
from eagleray.views.photometric import normalise

BATCH = 256
AHEAD = 4  # batches that are decoded while one is in the backbone


class LabelledFeatures(NamedTuple):
    """Features and classes of n images."""

    x: Tensor  # (n, D) features, not normalised
    y: Tensor  # (n,) classes


def extract_pooled(
    backbone: Backbone,
    index: Index,
    samples: NDArray[np.int64],
    *,
    size: int,
    resize: int,
    precision: Format = "auto",
) -> LabelledFeatures:
    """Extract the pooled features of these samples; see `extract_features`."""
    return extract_features(backbone, index, samples, size=size, resize=resize, precision=precision)["pooled"]


@torch.inference_mode()
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
    tick: Callable[[int], None] = lambda _: None,
) -> dict[str, LabelledFeatures]:
    """Extract several types of features of these samples in a single forward pass.

    The ranks share the images, and every rank returns the features of all images. Images that do not decode are left
    out. After each batch, `tick` is called with the number of its images.

    Raises UserError when the backbone lacks one of the types, or when the device does not compute in this precision."""
    device = next(backbone.parameters()).device
    xs: dict[str, list[Tensor]] = {kind: [] for kind in kinds}
    ys = [torch.empty(0, dtype=torch.long)]
    mine = np.array_split(samples, dist.size())[dist.rank()]
    for rows, images in batches(index, mine, size, resize):
        x = normalise(images, device)
        with autocast(device, precision):
            for kind, value in read(backbone, x, kinds).items():
                xs[kind].append(value.float().cpu())
        ys.append(torch.from_numpy(index.label[rows]))
        tick(len(rows))
    parts = dist.gather_objects(({kind: torch.cat(x).numpy() for kind, x in xs.items() if x}, torch.cat(ys).numpy()))
    y = torch.from_numpy(np.concatenate([y for _, y in parts]))
    return {
        kind: LabelledFeatures(torch.from_numpy(np.concatenate([x[kind] for x, _ in parts if x])), y)
        if len(y)
        else LabelledFeatures(torch.empty(0, backbone.dim), y)
        for kind in kinds
    }


def batches(
    index: Index, samples: NDArray[np.int64], size: int, resize: int, batch: int = BATCH
) -> Iterator[tuple[list[int], Tensor]]:
    """Yield the numbers of the samples in a batch that decode, and their centre crops (B, 3, size, size), uint8.

    While the caller uses a batch, threads decode the next batches."""

    def load(chunk: NDArray[np.int64]) -> list[tuple[int, Tensor]]:
        images = ((s, image(index, s, size, resize)) for s in chunk.tolist())
        return [(s, x) for s, x in images if x is not None]

    chunks = [samples[i : i + batch] for i in range(0, len(samples), batch)]
    with ThreadPoolExecutor(max((os.cpu_count() or 1) // dist.size(), 1)) as pool:
        queue = deque(pool.submit(load, c) for c in chunks[:AHEAD])
        for i in range(len(chunks)):
            good = queue.popleft().result()
            if i + AHEAD < len(chunks):
                queue.append(pool.submit(load, chunks[i + AHEAD]))
            if good:
                yield [s for s, _ in good], torch.stack([x for _, x in good])


def image(index: Index, sample: int, size: int, resize: int) -> Tensor | None:
    """Read the centre crop (3, size, size), uint8, of a sample; return None if the image does not decode."""
    data = index.read(sample, sample + 1)
    try:
        return centre_crop(decode(data), resize=resize, size=size)
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
