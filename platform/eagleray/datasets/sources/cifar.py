"""CIFAR-10 and CIFAR-100 in their binary version: records of labels and the three planes of a 32 x 32 image."""

from collections.abc import Iterator, Sequence
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

SIDE = 32
PIXELS = 3 * SIDE**2
PLANES = "planes"  # the extension of such an image, which is no file yet


def cifar_10(job: Job) -> Found:
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] if job.split != "test" else ["test_batch.bin"]
    return _found(job, "cifar-10", names, "batches.meta.txt", labels=1, classes=10)


def cifar_100(job: Job) -> Found:
    """With the 100 fine labels; the 20 coarse ones before them are not read."""
    return _found(job, "cifar-100", [f"{job.split or 'train'}.bin"], "fine_label_names.txt", labels=2, classes=100)


def _found(job: Job, title: str, names: Sequence[str], words: str, *, labels: int, classes: int) -> Found:
    """The folder that the archive unpacks to, or the one that this is in."""
    below = {PurePosixPath(b.url).name: b for b in files.below(job.origin)}
    missing = [n for n in (*names, words) if n not in below]
    if missing and below.keys() & {"data_batch_1", "test_batch", "train", "test"}:
        raise UserError(
            f"{job.origin}: holds the Python version, pickles that could run any code; expected {title}-binary.tar.gz, "
            f"unpacked: {missing[0]} and so on"
        )
    if missing:
        raise files.nothing(job.origin, f"{missing[0]} in it, as {title}-binary.tar.gz unpacks")
    blobs = [below[n] for n in names]
    return Found([*blobs, below[words]], partial(_listing, blobs, below[words], labels, classes))


def _listing(blobs: Sequence[Blob], words: Blob, labels: int, classes: int) -> Listing:
    return Listing(
        (item for blob in blobs for item in _items(blob, labels, classes)), files.text(words.url).split()[:classes]
    )


def _items(blob: Blob, labels: int, classes: int) -> Iterator[Item]:
    record = labels + PIXELS
    content = np.frombuffer(store.store(blob.url).get(blob.url), np.uint8)
    found = content[labels - 1 :: record]
    if len(content) % record or found.max(initial=0) >= classes:
        raise UserError(f"{blob.url}: expected records of {record} bytes with labels below {classes}")
    for i, label in enumerate(found.tolist()):
        key = f"{PurePosixPath(blob.url).stem}/{i:05d}"
        yield Item(key, blob.url, i * record + labels, PIXELS, PLANES, label)


def picture(planes: bytes | memoryview) -> bytes:
    """The PNG of an image's red, green and blue planes."""
    return encode(Image.fromarray(np.frombuffer(planes, np.uint8).reshape(3, SIDE, SIDE).transpose(1, 2, 0)))
