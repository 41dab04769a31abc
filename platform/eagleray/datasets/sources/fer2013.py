"""FER2013 as Kaggle publishes it: one CSV of classes, pixels as decimal numbers, and splits."""

import re
from collections.abc import Iterator
from functools import partial

import numpy as np
from PIL import Image

from eagleray.base.errors import UserError
from eagleray.datasets.shards import encode
from eagleray.datasets.sources import files
from eagleray.datasets.sources.item import Item, Listing
from eagleray.datasets.sources.options import PrepareOptions
from eagleray.datasets.sources.source import RESEARCH, Data, Dataset, Source, SourceFiles, read_ranges
from eagleray.storage import store
from eagleray.storage.blob import Blob

SIDE, NAME = 48, "fer2013.csv"
WORDS = "words"  # extension of items whose bytes are pixels as decimal numbers
CLASSES = ("angry", "disgust", "fear", "happy", "sad", "surprise", "neutral")
USAGES = {
    "trainval": (b"Training", b"PublicTest"),
    "test": (b"PrivateTest",),
    "train": (b"Training",),
    "val": (b"PublicTest",),
}
LINE = re.compile(rb'([0-6]),"?((?:\d{1,3} ){2303}\d{1,3})"?,(\w+)\s*')


def fer2013(options: PrepareOptions) -> SourceFiles:
    """Find fer2013.csv in the folder."""
    blobs = [b for b in files.list_folder(options.origin + "/") if b.url.endswith(f"/{NAME}")]
    if not blobs:
        raise files.missing_error(options.origin, f"{NAME} in it")
    listing = partial(_listing, blobs[0], USAGES[options.split or "trainval"])
    return SourceFiles(blobs, listing, partial(read_ranges, encode=png))


def _listing(blob: Blob, usages: tuple[bytes, ...]) -> Listing:
    return Listing(_items(blob, usages), CLASSES)


def _items(blob: Blob, usages: tuple[bytes, ...]) -> Iterator[Item]:
    offset = 0
    for number, line in enumerate(bytes(store.store(blob.url).get(blob.url)).splitlines(keepends=True)):
        match = LINE.fullmatch(line)
        if not match and number and line.strip():
            raise UserError(
                f"{blob.url}: line {number + 1}: expected emotion,pixels,Usage: "
                f"a class from 0 to 6, {SIDE**2} grey values separated by spaces, and a split"
            )
        if match and match[3] in usages:
            start, end = match.span(2)
            key = f"{match[3].decode()}/{number - 1:05d}"
            yield Item(key, blob.url, offset + start, end - start, WORDS, int(match[1]))
        offset += len(line)


def png(words: Data) -> bytes:
    """Encode an image as a PNG; `words` are its grey pixels, written as decimal numbers. Raises UserError."""
    pixels = np.array(bytes(words).split(), np.int64)
    if pixels.max() > 255:
        raise UserError(f"{NAME}: expected grey values from 0 to 255, found {pixels.max()}")
    return encode(Image.fromarray(pixels.astype(np.uint8).reshape(SIDE, SIDE)))


SOURCES = {
    "fer2013": Source(
        fer2013,
        licence=RESEARCH,
        dataset=Dataset(
            "FER2013",
            short="fer2013k",
            classes=7,
            splits={"trainval": 32_298, "test": 3_589, "train": 28_709, "val": 3_589},
            obtain="Download fer2013.tar.gz from "
            "kaggle.com/c/challenges-in-representation-learning-facial-expression-recognition-challenge",
            contents="`fer2013.csv`",
        ),
    )
}
