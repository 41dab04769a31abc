"""CIFAR-10 and CIFAR-100 in their binary version: records of labels and the three planes of a 32 x 32 image."""

from collections.abc import Iterator, Sequence
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

SIDE = 32
PIXELS = 3 * SIDE**2
PLANES = "planes"  # extension of items whose bytes are raw pixels


def cifar_10(options: PrepareOptions) -> SourceFiles:
    """Find CIFAR-10's five training files or its test file."""
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] if options.split != "test" else ["test_batch.bin"]
    return _source_files(options, "cifar-10", names, "batches.meta.txt", labels=1, classes=10)


def cifar_100(options: PrepareOptions) -> SourceFiles:
    """Find the file of a split of CIFAR-100.

    The labels are the 100 fine classes. The 20 coarse classes, which precede them in each record, are skipped.
    """
    names = [f"{options.split or 'train'}.bin"]
    return _source_files(options, "cifar-100", names, "fine_label_names.txt", labels=2, classes=100)


def _source_files(
    options: PrepareOptions, title: str, names: Sequence[str], words: str, *, labels: int, classes: int
) -> SourceFiles:
    """Find the record files `names`, and the text file `words` that lists the names of the classes.

    They may lie anywhere in the folder. Each record has `labels` bytes of labels, of which the last is used.
    """
    blobs = {PurePosixPath(b.url).name: b for b in files.list_tree(options.origin)}
    missing = [n for n in (*names, words) if n not in blobs]
    if missing and blobs.keys() & {"data_batch_1", "test_batch", "train", "test"}:
        raise UserError(
            f"{options.origin}: holds the Python version of {title}, which is not read because its pickles could run "
            f"any code; expected {missing[0]} and the other files of {title}-binary.tar.gz, unpacked"
        )
    if missing:
        raise files.missing_error(options.origin, f"{missing[0]} in it, unpacked from {title}-binary.tar.gz")
    records = [blobs[n] for n in names]
    listing = partial(_listing, records, blobs[words], labels, classes)
    return SourceFiles([*records, blobs[words]], listing, partial(read_ranges, encode=png))


def _listing(blobs: Sequence[Blob], words: Blob, labels: int, classes: int) -> Listing:
    return Listing(
        (item for blob in blobs for item in _items(blob, labels, classes)), files.read_text(words.url).split()[:classes]
    )


def _items(blob: Blob, labels: int, classes: int) -> Iterator[Item]:
    record = labels + PIXELS
    content = np.frombuffer(store.store(blob.url).get(blob.url), np.uint8)
    y = content[labels - 1 :: record]
    if len(content) % record or y.max(initial=0) >= classes:
        raise UserError(
            f"{blob.url}: not in CIFAR's binary format; expected records of {record} bytes with labels below {classes}"
        )
    for i, label in enumerate(y.tolist()):
        key = f"{PurePosixPath(blob.url).stem}/{i:05d}"
        yield Item(key, blob.url, i * record + labels, PIXELS, PLANES, label)


def png(planes: Data) -> bytes:
    """Encode an image as a PNG from its red, green and blue planes, which are stored row by row."""
    return encode(Image.fromarray(np.frombuffer(planes, np.uint8).reshape(3, SIDE, SIDE).transpose(1, 2, 0)))


SOURCES = {
    "cifar-10": Source(
        cifar_10,
        licence=RESEARCH,
        dataset=Dataset(
            "CIFAR-10",
            short="cifar10",
            classes=10,
            splits={"train": 50_000, "test": 10_000},
            obtain="Download cifar-10-binary.tar.gz from cs.toronto.edu/~kriz/cifar.html",
            contents="`data_batch_1.bin` ..., `test_batch.bin`, `batches.meta.txt`",
        ),
    ),
    "cifar-100": Source(
        cifar_100,
        licence=RESEARCH,
        dataset=Dataset(
            "CIFAR-100",
            short="cifar100",
            classes=100,
            splits={"train": 50_000, "test": 10_000},
            obtain="Download cifar-100-binary.tar.gz from cs.toronto.edu/~kriz/cifar.html",
            contents="`train.bin`, `test.bin`, `fine_label_names.txt`",
        ),
    ),
}
