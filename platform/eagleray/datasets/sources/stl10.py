"""STL-10's labelled images in its binary version: the three planes of 96 x 96 pixels, column after column."""

from collections.abc import Iterator
from functools import partial
from pathlib import PurePosixPath

import numpy as np
from PIL import Image

from eagleray.base.errors import UserError
from eagleray.datasets.shards import encode
from eagleray.datasets.sources import files
from eagleray.datasets.sources.item import Found, Item, Listing
from eagleray.datasets.sources.job import Job
from eagleray.storage import store
from eagleray.storage.blob import Blob

SIDE = 96
BYTES = 3 * SIDE**2
COLUMNS = "columns"  # the extension of such an image, which is no file yet
WORDS = "class_names.txt"


def stl10(job: Job) -> Found:
    """The folder stl10_binary, or the one that this is in."""
    split = job.split or "train"
    below = {PurePosixPath(b.url).name: b for b in files.below(job.origin)}
    names = [f"{split}_X.bin", f"{split}_y.bin", WORDS]
    missing = [name for name in names if name not in below]
    if missing:
        raise files.nothing(job.origin, f"{missing[0]} in it, as stl10_binary.tar.gz unpacks")
    images, labels, words = (below[name] for name in names)
    return Found([images, labels, words], partial(_listing, images, labels, words, split))


def _listing(images: Blob, labels: Blob, words: Blob, split: str) -> Listing:
    found = np.frombuffer(store.store(labels.url).get(labels.url), np.uint8)
    if images.size != len(found) * BYTES or found.min(initial=1) < 1 or found.max(initial=1) > 10:
        raise UserError(
            f"{images.url}: expected {len(found)} images of {BYTES} bytes with labels of 1 to 10, as in {labels.url}"
        )
    return Listing(_items(images, found.tolist(), split), files.text(words.url).split())


def _items(images: Blob, labels: list[int], split: str) -> Iterator[Item]:
    for i, label in enumerate(labels):
        yield Item(f"{split}/{i:05d}", images.url, i * BYTES, BYTES, COLUMNS, label - 1)


def picture(planes: bytes | memoryview) -> bytes:
    return encode(Image.fromarray(np.frombuffer(planes, np.uint8).reshape(3, SIDE, SIDE).transpose(2, 1, 0)))
