"""FER2013 as Kaggle has it: one CSV of classes, pixels in words, and splits."""

import re
from collections.abc import Iterator

import numpy as np
from PIL import Image

from eagleray.base.errors import UserError
from eagleray.datasets.shards import encode
from eagleray.datasets.sources import files
from eagleray.datasets.sources.item import Found, Item, Listing
from eagleray.datasets.sources.job import Job
from eagleray.storage import store
from eagleray.storage.blob import Blob

SIDE, NAME = 48, "fer2013.csv"
WORDS = "words"  # the extension of such an image, which is no file yet
CLASSES = ("angry", "disgust", "fear", "happy", "sad", "surprise", "neutral")
USAGES = {
    "trainval": (b"Training", b"PublicTest"),
    "test": (b"PrivateTest",),
    "train": (b"Training",),
    "val": (b"PublicTest",),
}
LINE = re.compile(rb'([0-6]),"?((?:\d+ ){2303}\d+)"?,(\w+)\s*')


def fer2013(job: Job) -> Found:
    """The folder that has fer2013.csv."""
    here = [b for b in files.directly(job.origin + "/") if b.url.endswith(f"/{NAME}")]
    if not here:
        raise files.nothing(job.origin, f"{NAME} in it")
    return Found(here, lambda: Listing(_items(here[0], USAGES[job.split or "trainval"]), CLASSES))


def _items(blob: Blob, usages: tuple[bytes, ...]) -> Iterator[Item]:
    at = 0
    for number, line in enumerate(bytes(store.store(blob.url).get(blob.url)).splitlines(keepends=True)):
        match = LINE.fullmatch(line)
        if not match and number and line.strip():
            raise UserError(
                f"{blob.url}: line {number + 1}: expected emotion,pixels,Usage with 0 to 6 and {SIDE**2} pixels"
            )
        if match and match[3] in usages:
            start, end = match.span(2)
            yield Item(f"{match[3].decode()}/{number - 1:05d}", blob.url, at + start, end - start, WORDS, int(match[1]))
        at += len(line)


def picture(words: bytes | memoryview) -> bytes:
    pixels = np.array(bytes(words).split(), np.int64).astype(np.uint8)
    return encode(Image.fromarray(pixels.reshape(SIDE, SIDE)))
