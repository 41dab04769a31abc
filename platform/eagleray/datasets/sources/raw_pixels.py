"""Read data sets whose images are raw pixels in a few large files: MNIST, CIFAR-10, CIFAR-100, STL-10 and FER2013."""

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import PurePosixPath

import numpy as np
from PIL import Image

from eagleray.base.errors import UserError
from eagleray.datasets.shards import encode
from eagleray.datasets.sources import files
from eagleray.datasets.sources.item import Item, Listing
from eagleray.datasets.sources.source import Data, PrepareOptions, SourceFiles, read_ranges
from eagleray.storage import store
from eagleray.storage.blob import Blob

RAW = "raw"  # extension of items whose bytes are pixel values, in binary or as decimal text
DIGITS = tuple("0123456789")


def mnist(options: PrepareOptions) -> SourceFiles:
    """Find the two unpacked files of a split, such as train-images-idx3-ubyte. Both begin with a short header."""
    stem, side = {"train": "train", "test": "t10k"}[options.split], 28
    found = files.by_name(files.list_folder(options.origin + "/"))
    blobs = {name.replace(".idx", "-idx"): blob for name, blob in found.items()}
    names = [f"{stem}-images-idx3-ubyte", f"{stem}-labels-idx1-ubyte"]
    images, labels = files.pick(options.origin, blobs, names)

    def listing() -> Listing:
        y = _bytes(labels)[8:]
        if images.size != 16 + len(y) * side**2 or y.max(initial=0) > 9:
            raise UserError(
                f"{images.url}: expected {len(y)} images of {side} x {side} bytes, one for each label in {labels.url}"
            )
        return Listing(_ranges(images, stem, y.tolist(), side**2, start=16), DIGITS)

    return SourceFiles([images, labels], listing, _reader((side, side), (0, 1)))


def cifar_10(options: PrepareOptions) -> SourceFiles:
    """Find CIFAR-10's five training files or its test file."""
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] if options.split != "test" else ["test_batch.bin"]
    return _cifar(options.origin, "cifar-10", names, "batches.meta.txt", labels=1, classes=10)


def cifar_100(options: PrepareOptions) -> SourceFiles:
    """Find the file of a split of CIFAR-100.

    The labels are the 100 fine classes. The 20 coarse classes, which precede them in each record, are skipped."""
    return _cifar(options.origin, "cifar-100", [f"{options.split}.bin"], "fine_label_names.txt", labels=2, classes=100)


def _cifar(origin: str, title: str, names: Sequence[str], words: str, *, labels: int, classes: int) -> SourceFiles:
    """Find the record files `names`, and the text file `words` with the names of the classes.

    These files may be anywhere in the folder. Each record has `labels` bytes of labels, of which the last is used, and
    then the red, green and blue planes of an image."""
    blobs = files.by_name(files.list_tree(origin))
    missing = [name for name in (*names, words) if name not in blobs]
    if missing and blobs.keys() & {"data_batch_1", "test_batch", "train", "test"}:
        raise UserError(
            f"{origin}: holds the Python version of {title}, which is not read because its pickles could run "
            f"any code; expected {missing[0]} and the other files of {title}-binary.tar.gz, unpacked"
        )
    *records, text = files.pick(origin, blobs, (*names, words), f"{title}-binary.tar.gz")
    pixels = 3 * 32**2
    step = labels + pixels

    def items() -> Iterator[Item]:
        for blob in records:
            content = _bytes(blob)
            y = content[labels - 1 :: step]
            if len(content) % step or y.max(initial=0) >= classes:
                raise UserError(
                    f"{blob.url}: not in CIFAR's binary format; expected records of {step} bytes with labels below "
                    f"{classes}"
                )
            stem = PurePosixPath(blob.url).stem
            yield from _ranges(blob, stem, y.tolist(), pixels, start=labels, step=step)

    def listing() -> Listing:
        return Listing(items(), files.read_text(text.url).split()[:classes])

    return SourceFiles([*records, text], listing, _reader((3, 32, 32), (1, 2, 0)))


def stl10(options: PrepareOptions) -> SourceFiles:
    """Find the files of the labelled images of a split in the folder stl10_binary, or in a folder above it.

    The colour planes of an image are stored column by column."""
    split, side = options.split, 96
    blobs = files.by_name(files.list_tree(options.origin))
    names = [f"{split}_X.bin", f"{split}_y.bin", "class_names.txt"]
    images, labels, words = files.pick(options.origin, blobs, names, "stl10_binary.tar.gz")
    pixels = 3 * side**2

    def listing() -> Listing:
        y = _bytes(labels)
        if images.size != len(y) * pixels or y.min(initial=1) < 1 or y.max(initial=1) > 10:
            raise UserError(
                f"{images.url}: expected {len(y)} images of {pixels} bytes, and labels from 1 to 10 in {labels.url}"
            )
        return Listing(_ranges(images, split, (y - 1).tolist(), pixels), files.read_text(words.url).split())

    return SourceFiles([images, labels, words], listing, _reader((3, side, side), (2, 1, 0)))


def _bytes(blob: Blob) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(store.store(blob.url).get(blob.url), np.uint8)


def _ranges(
    blob: Blob, stem: str, labels: Iterable[int], size: int, *, start: int = 0, step: int = 0
) -> Iterator[Item]:
    """Yield an item for each image of a file. Image i has `size` bytes and begins at byte `start` + i * `step`, where
    `step` 0 stands for `size`."""
    for i, label in enumerate(labels):
        yield Item(f"{stem}/{i:05d}", blob.url, start + i * (step or size), size, RAW, label)


def _reader(shape: tuple[int, ...], axes: tuple[int, ...]) -> partial[Iterator[tuple[Item, Data]]]:
    """Return a function that reads images, stored as arrays of `shape` whose axes `axes` are rows, columns, colours."""
    return partial(read_ranges, encode=partial(_png, shape=shape, axes=axes))


def _png(pixels: Data, shape: tuple[int, ...], axes: tuple[int, ...]) -> bytes:
    return encode(Image.fromarray(np.frombuffer(pixels, np.uint8).reshape(shape).transpose(axes)))


FER2013 = "fer2013.csv"
FACES = ("angry", "disgust", "fear", "happy", "sad", "surprise", "neutral")
USAGES = {
    "trainval": (b"Training", b"PublicTest"),
    "test": (b"PrivateTest",),
    "train": (b"Training",),
    "val": (b"PublicTest",),
}
FACE = re.compile(rb'([0-6]),"?((?:\d{1,3} ){2303}\d{1,3})"?,(\w+)\s*')  # 48 x 48 pixels


def fer2013(options: PrepareOptions) -> SourceFiles:
    """Find Kaggle's fer2013.csv, which has the class, the pixels as decimal numbers and the split of each face."""
    [table] = files.pick(options.origin, files.by_name(files.list_folder(options.origin + "/")), [FER2013])
    usages = USAGES[options.split]
    return SourceFiles([table], lambda: Listing(_faces(table, usages), FACES), partial(read_ranges, encode=_face_png))


def _faces(blob: Blob, usages: Sequence[bytes]) -> Iterator[Item]:
    offset = 0
    for number, line in enumerate(bytes(store.store(blob.url).get(blob.url)).splitlines(keepends=True)):
        match = FACE.fullmatch(line)
        if not match and number and line.strip():
            raise UserError(
                f"{blob.url}: line {number + 1}: expected emotion,pixels,Usage: "
                "a class from 0 to 6, 2304 grey values separated by spaces, and a split"
            )
        if match and match[3] in usages:
            start, end = match.span(2)
            key = f"{match[3].decode()}/{number - 1:05d}"
            yield Item(key, blob.url, offset + start, end - start, RAW, int(match[1]))
        offset += len(line)


def _face_png(words: Data) -> bytes:
    """Encode a face as a PNG, from its grey values as decimal `words`. Raises UserError for a value above 255."""
    pixels = np.array(bytes(words).split(), np.int64)
    if pixels.max() > 255:
        raise UserError(f"{FER2013}: expected grey values from 0 to 255, found {pixels.max()}")
    return encode(Image.fromarray(pixels.astype(np.uint8).reshape(48, 48)))
