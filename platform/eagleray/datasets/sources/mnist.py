"""Read MNIST, in which each split has two uncompressed files, for pixels and for labels, that begin with a short
header.
"""

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
from eagleray.datasets.sources.source import RESEARCH, Data, Dataset, Source, SourceFiles, read_ranges
from eagleray.storage import store
from eagleray.storage.blob import Blob

SIDE = 28  # pixels
IMAGES, LABELS = 16, 8  # bytes of the headers of both files
GREY = "grey28"  # extension of items whose bytes are raw pixels
STEMS = {"train": "train", "test": "t10k"}


def mnist(options: PrepareOptions) -> SourceFiles:
    """Find the two unpacked files of a split, such as train-images-idx3-ubyte."""
    stem = STEMS[options.split or "train"]
    blobs = {PurePosixPath(b.url).name.replace(".idx", "-idx"): b for b in files.list_folder(options.origin + "/")}
    names = [f"{stem}-images-idx3-ubyte", f"{stem}-labels-idx1-ubyte"]
    missing = [name for name in names if name not in blobs]
    if missing:
        raise files.missing_error(options.origin, f"{missing[0]} in it")
    images, labels = (blobs[name] for name in names)
    return SourceFiles([images, labels], partial(_listing, images, labels, stem), partial(read_ranges, encode=png))


def _listing(images: Blob, labels: Blob, stem: str) -> Listing:
    y = np.frombuffer(store.store(labels.url).get(labels.url), np.uint8)[LABELS:]
    if images.size != IMAGES + len(y) * SIDE**2 or y.max(initial=0) > 9:
        raise UserError(
            f"{images.url}: expected {len(y)} images of {SIDE} x {SIDE} bytes, one for each label in {labels.url}"
        )
    return Listing(_items(images, y.tolist(), stem), [str(digit) for digit in range(10)])


def _items(images: Blob, labels: list[int], stem: str) -> Iterator[Item]:
    for i, label in enumerate(labels):
        yield Item(f"{stem}/{i:05d}", images.url, IMAGES + i * SIDE**2, SIDE**2, GREY, label)


def png(pixels: Data) -> bytes:
    """Encode the grey pixels of an image as a PNG."""
    return encode(Image.fromarray(np.frombuffer(pixels, np.uint8).reshape(SIDE, SIDE)))


SOURCES = {
    "mnist": Source(
        mnist,
        licence=RESEARCH,
        dataset=Dataset(
            "MNIST",
            short="mnist60k",
            classes=10,
            splits={"train": 60_000, "test": 10_000},
            obtain="Download the four .gz files from yann.lecun.com/exdb/mnist",
            contents="`train-images-idx3-ubyte` and so on, unpacked",
        ),
    )
}
