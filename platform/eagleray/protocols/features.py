"""Frozen features of labelled images, extracted once for all protocols."""

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
from eagleray.data.decode import BadImage, decode
from eagleray.data.index import Index
from eagleray.models.backbone import Backbone
from eagleray.protocols.eval_mode import evaluating
from eagleray.protocols.feature_types import read
from eagleray.storage import store
from eagleray.views.crop import centre_crop
from eagleray.views.photometric import normalised

BATCH = 256
AHEAD = 4  # batches decoded while one is in the backbone


class Labelled(NamedTuple):
    """n images."""

    x: Tensor  # (n, D) features, not normalised
    y: Tensor  # (n,) classes


def extract(backbone: Backbone, index: Index, samples: NDArray[np.int64], *, size: int, resize: int) -> Labelled:
    """Pooled features of some samples, shared out over the ranks and gathered on all. Broken images are left out."""
    return extracted(backbone, index, samples, size=size, resize=resize)["pooled"]


@torch.inference_mode()
@evaluating
def extracted(
    backbone: Backbone,
    index: Index,
    samples: NDArray[np.int64],
    *,
    size: int,
    resize: int,
    kinds: Sequence[str] = ("pooled",),
    tick: Callable[[int], None] = lambda _: None,
) -> dict[str, Labelled]:
    """The same for several kinds of features, with one forward pass for all; `tick` is told how many images are done.
    Raises UserError for a backbone that lacks one of them."""
    device = next(backbone.parameters()).device
    xs: dict[str, list[Tensor]] = {kind: [] for kind in kinds}
    ys = [torch.empty(0, dtype=torch.long)]
    mine = np.array_split(samples, dist.size())[dist.rank()]
    for found, images in batches(index, mine, size, resize):
        x = normalised(images, device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            for kind, value in read(backbone, x, kinds).items():
                xs[kind].append(value.float().cpu())
        ys.append(torch.from_numpy(index.label[found]))
        tick(len(found))
    parts = dist.objects(({kind: torch.cat(x).numpy() for kind, x in xs.items() if x}, torch.cat(ys).numpy()))
    y = torch.from_numpy(np.concatenate([y for _, y in parts]))
    return {
        kind: Labelled(torch.from_numpy(np.concatenate([x[kind] for x, _ in parts if x])), y)
        if len(y)
        else Labelled(torch.empty(0, backbone.dim), y)
        for kind in kinds
    }


def batches(
    index: Index, samples: NDArray[np.int64], size: int, resize: int, batch: int = BATCH
) -> Iterator[tuple[list[int], Tensor]]:
    """The samples that decode and their centre crops (B, 3, size, size), uint8; some batches are decoded ahead of the
    one in use."""

    def load(chunk: NDArray[np.int64]) -> list[tuple[int, Tensor]]:
        found = ((s, image(index, s, size, resize)) for s in chunk.tolist())
        return [(s, x) for s, x in found if x is not None]

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
    rows = index.rows(sample, sample + 1)
    data = store.store(rows.blob.url).read(rows.blob.url, int(rows.offset[0]), int(rows.size[0]))
    try:
        return centre_crop(decode(data), resize=resize, size=size)
    except BadImage:
        return None


def labelled(index: Index) -> NDArray[np.int64]:
    """The samples that have a label."""
    return np.flatnonzero(index.label >= 0)


def undecoded(index: Index) -> UserError:
    """What is to be said where an image was needed and none could be used."""
    return UserError(f"{index.shards[0].url}: no image there decodes, nor in the shards beside it")


def some(samples: NDArray[np.int64], count: int | None) -> NDArray[np.int64]:
    """At most `count` of the samples, in their order; drawn, always the same ones, as classes may take turns."""
    if count is None or count >= len(samples):
        return samples
    return np.sort(np.random.default_rng(0).choice(samples, count, replace=False))
