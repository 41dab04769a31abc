"""Read the labelled images of STL-10 in its binary version: three planes of 96 x 96 pixels, stored column by column."""

from collections.abc import Iterator
from functools import partial
from pathlib import PurePosixPath

import numpy as np
from PIL import Image

from eagleray.base.errors import UserError
from eagleray.datasets.shards import encode
from eagleray.datasets.sources import files
from eagleray.datasets.sources.item import Item, Listing
from eagleray.datasets.sources.options import PrepareOptions
from eagleray.datasets.sources.source import IMAGENET, Data, Dataset, Source, SourceFiles, read_ranges
from eagleray.storage import store
from eagleray.storage.blob import Blob

SIDE = 96
BYTES = 3 * SIDE**2
COLUMNS = "columns"  # extension of items whose bytes are raw pixels
WORDS = "class_names.txt"


def stl10(options: PrepareOptions) -> SourceFiles:
    """Find the files of a split in the folder stl10_binary, or in a folder above it."""
    split = options.split or "train"
    blobs = {PurePosixPath(b.url).name: b for b in files.list_tree(options.origin)}
    names = [f"{split}_X.bin", f"{split}_y.bin", WORDS]
    missing = [name for name in names if name not in blobs]
    if missing:
        raise files.missing_error(options.origin, f"{missing[0]} in it, unpacked from stl10_binary.tar.gz")
    images, labels, words = (blobs[name] for name in names)
    listing = partial(_listing, images, labels, words, split)
    return SourceFiles([images, labels, words], listing, partial(read_ranges, encode=png))


def _listing(images: Blob, labels: Blob, words: Blob, split: str) -> Listing:
    y = np.frombuffer(store.store(labels.url).get(labels.url), np.uint8)
    if images.size != len(y) * BYTES or y.min(initial=1) < 1 or y.max(initial=1) > 10:
        raise UserError(
            f"{images.url}: expected {len(y)} images of {BYTES} bytes, and labels from 1 to 10 in {labels.url}"
        )
    return Listing(_items(images, y.tolist(), split), files.read_text(words.url).split())


def _items(images: Blob, labels: list[int], split: str) -> Iterator[Item]:
    for i, label in enumerate(labels):
        yield Item(f"{split}/{i:05d}", images.url, i * BYTES, BYTES, COLUMNS, label - 1)


def png(planes: Data) -> bytes:
    """Encode an image as a PNG from its red, green and blue planes, which are stored column by column."""
    return encode(Image.fromarray(np.frombuffer(planes, np.uint8).reshape(3, SIDE, SIDE).transpose(2, 1, 0)))


SOURCES = {
    "stl10": Source(
        stl10,
        licence=IMAGENET,
        dataset=Dataset(
            "STL-10",
            short="stl10",
            classes=10,
            splits={"train": 5_000, "test": 8_000},
            obtain="Download stl10_binary.tar.gz from cs.stanford.edu/~acoates/stl10",
            contents="`train_X.bin`, `train_y.bin`, `test_X.bin`, `test_y.bin`, `class_names.txt`",
        ),
    )
}
