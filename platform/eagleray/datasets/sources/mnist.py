"""MNIST: two files for each split, of bytes without compression after a header that says how many."""

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

SIDE, IMAGES, LABELS = 28, 16, 8  # pixels, and the bytes of both headers
GREY = "grey28"  # the extension of such an image, which is no file yet
STEMS = {"train": "train", "test": "t10k"}


def mnist(job: Job) -> Found:
    """The folder that has, unpacked, train-images-idx3-ubyte and so on."""
    stem = STEMS[job.split or "train"]
    here = {PurePosixPath(b.url).name.replace(".idx", "-idx"): b for b in files.directly(job.origin + "/")}
    names = [f"{stem}-images-idx3-ubyte", f"{stem}-labels-idx1-ubyte"]
    missing = [name for name in names if name not in here]
    if missing:
        raise files.nothing(job.origin, f"{missing[0]} in it")
    images, labels = (here[name] for name in names)
    return Found([images, labels], partial(_listing, images, labels, stem))


def _listing(images: Blob, labels: Blob, stem: str) -> Listing:
    found = np.frombuffer(store.store(labels.url).get(labels.url), np.uint8)[LABELS:]
    if images.size != IMAGES + len(found) * SIDE**2 or found.max(initial=0) > 9:
        raise UserError(f"{images.url}: expected {len(found)} images of {SIDE} x {SIDE} bytes, as in {labels.url}")
    return Listing(_items(images, found.tolist(), stem), [str(digit) for digit in range(10)])


def _items(images: Blob, labels: list[int], stem: str) -> Iterator[Item]:
    for i, label in enumerate(labels):
        yield Item(f"{stem}/{i:05d}", images.url, IMAGES + i * SIDE**2, SIDE**2, GREY, label)


def picture(pixels: bytes | memoryview) -> bytes:
    return encode(Image.fromarray(np.frombuffer(pixels, np.uint8).reshape(SIDE, SIDE)))
