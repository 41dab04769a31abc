"""Describe a data set by its card, or by its index and some of its images."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagleray.base.console import say, say_loading
from eagleray.base.errors import UserError
from eagleray.base.progress import progress_over
from eagleray.data.costs import BadImage
from eagleray.data.index import Index, open_shown
from eagleray.data.index_faults import faults
from eagleray.data.pixels import read_pixels
from eagleray.datasets.card import find
from eagleray.datasets.stats import ImageStats
from eagleray.storage import store

SAMPLE = 1000  # most images that are decoded if there is no card
SHEET = 64  # most images on a contact sheet


def describe(url: str, spare: Path) -> tuple[dict[str, Any], list[NDArray[np.uint8]]]:
    """Return the card of some shards, and images (H, W, 3) for a contact sheet. Every call returns the same images.

    If the shards have no card, one is estimated from the index and a sample of the images. If no index can be written
    beside the shards, it is written to the folder `spare`. No images are returned if their channels are not red, green
    and blue."""
    index = open_shown(url, spare, note=say)
    order = np.random.default_rng(0).permutation(len(index))
    selected = list(store.patterns(url))
    card = find(selected[0].folder) if len(selected) == 1 and not selected[0].name else None
    left_out = list(faults(zip(index.shards, index.files, strict=True)).lines())
    card = card | {"left_out": left_out} if card and left_out else card
    if card and (card.get("options") or {}).get("--channels"):
        return card, []
    if card:
        return card, _sample(index, order[:SHEET], read_pixels)[1]
    say_loading()
    from eagleray.data.decode import decode  # decodes as in training; imported late, as PyTorch takes 1.5 s

    sample, images, shapes = _sample(index, order[:SAMPLE], lambda data: decode(data).permute(1, 2, 0).numpy())
    labels = index.label[index.label >= 0]
    card = {
        "classes": len(np.unique(labels)),
        "shards": index.packed,
        "sampled": sample.images,
        **sample.to_json(),
        "images": len(index),
        "bytes": int(index.size.sum()),
        "quantiles": {name: np.quantile(values, [0.05, 0.5, 0.95]).tolist() for name, values in shapes.items()},
        "left_out": left_out,
    }
    return card, images


def _sample(
    index: Index, samples: NDArray[np.int64], decode: Callable[[memoryview], NDArray[np.uint8]]
) -> tuple[ImageStats, list[NDArray[np.uint8]], dict[str, list[float]]]:
    """Return the statistics of some samples, the first SHEET images (H, W, 3) among them, and lists with the shorter
    side in pixels and the aspect ratio of every image. Raises UserError when none can be decoded."""
    stats, shapes = ImageStats(), dict[str, list[float]](side=[], aspect=[])
    images: list[NDArray[np.uint8]] = []
    for sample in progress_over("images", "reading", samples.tolist(), len(samples)):
        data = index.read(sample, sample + 1)
        try:
            image = decode(data)
        except BadImage as e:
            stats.drop(str(e), index.key(sample))
            continue
        height, width = image.shape[:2]
        stats.count(data, height, width)
        shapes["side"].append(min(height, width))
        shapes["aspect"].append(width / height)
        if len(images) < SHEET:
            images.append(image)
    if not images:
        why = max(stats.dropped, key=lambda reason: stats.dropped[reason].count)
        raise UserError(f"{index.shards[0].url}: none of {len(samples)} images can be decoded: {why}")
    return stats, images, shapes
