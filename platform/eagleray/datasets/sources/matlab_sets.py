"""Read data sets whose classes are in MATLAB files: Oxford Flowers-102, Stanford Cars and SVHN's cropped digits."""

from collections.abc import Iterator, Sequence

import numpy as np
from PIL import Image

from eagleray.base.errors import UserError, explained
from eagleray.datasets.shards import encode
from eagleray.datasets.sources import files, matlab
from eagleray.datasets.sources.item import Item, Listing
from eagleray.datasets.sources.lists import Rows, find_listed
from eagleray.datasets.sources.raw_pixels import DIGITS, RAW
from eagleray.datasets.sources.source import PrepareOptions, SourceFiles
from eagleray.storage.blob import Blob

NUMBERS = {"trainval": ("trnid", "valid"), "test": ("tstid",), "train": ("trnid",), "val": ("valid",)}
CARS = {"train": "devkit/cars_train_annos.mat", "test": "devkit/cars_test_annos_withlabels.mat"}
MAKES = range(1, 197)


def flowers(options: PrepareOptions) -> SourceFiles:
    """Find jpg/, imagelabels.mat and setid.mat.

    As is usual, the default split joins the two small splits, train and val."""

    def rows(numbers: Blob, split: Blob) -> Rows:
        labels = matlab.read_numbers(numbers.url, ["labels"], range(1, 103))[0]
        ids = matlab.read_numbers(split.url, NUMBERS[options.split], range(1, 100_000))
        for number in np.sort(np.concatenate(ids)).tolist():
            if number > len(labels):
                raise UserError(f"{split.url}: image {number} is not among the {len(labels)} images of imagelabels.mat")
            yield f"image_{number:05d}.jpg", labels[number - 1].item() - 1

    return find_listed(
        options.origin,
        ["imagelabels.mat", "setid.mat"],
        "jpg",
        lambda tables: (rows(*tables), ()),
        expected="jpg/image_00001.jpg in it",
    )


def cars(options: PrepareOptions) -> SourceFiles:
    """Find cars_train/, cars_test/ and devkit/, and the labels of the test images in or beside devkit/."""
    folder = f"cars_{options.split}"
    return find_listed(
        options.origin,
        [CARS[options.split]],
        folder,
        lambda tables: (_cars(tables[0]), ()),
        expected=f"{folder}/00001.jpg in it",
        anywhere=True,
        by="name",
    )


def _cars(table: Blob) -> Rows:
    [annotations] = matlab.read_arrays(table.url, "annotations")
    wrong_types = ValueError, IndexError, AttributeError, TypeError, OverflowError
    with explained(f"{table.url}: expected annotations with the fields fname and class", *wrong_types, why=False):
        rows = [(str(r["fname"].item()), int(r["class"].item())) for r in annotations.ravel()]
    if wrong := [label for _, label in rows if label not in MAKES]:
        raise UserError(f"{table.url}: expected classes of 1 to {len(MAKES)}, found {wrong[0]:.3g}")
    return [(name, label - 1) for name, label in rows]


def svhn(options: PrepareOptions) -> SourceFiles:
    """Find train_32x32.mat or test_32x32.mat in the folder. In these files, the digit 0 has the label 10."""
    there = files.by_name(files.list_folder(options.origin + "/"))
    [table] = files.pick(options.origin, there, [f"{options.split}_32x32.mat"])
    return SourceFiles([table], lambda: Listing(_digits(table, options.split), DIGITS), read_digits)


def _digits(table: Blob, split: str) -> Iterator[Item]:
    [labels] = matlab.read_numbers(table.url, ["y"], range(1, 11))
    for i, label in enumerate(labels.tolist()):  # the offset is the image's position in the array
        yield Item(f"{split}/{i:06d}", table.url, i, 3 * 32**2, RAW, label % 10)


def read_digits(rows: Sequence[Item]) -> Iterator[tuple[Item, bytes]]:
    """Yield the items of one MATLAB file, with their images as PNGs. The whole file is read into memory."""
    [pixels] = matlab.read_arrays(rows[0].url, "X")  # (32, 32, 3, N)
    count = max(item.offset for item in rows) + 1
    if pixels.dtype != np.uint8 or pixels.shape[:-1] != (32, 32, 3) or pixels.shape[-1] < count:
        kind = f"{' x '.join(map(str, pixels.shape))} of type {pixels.dtype}"
        raise UserError(f"{rows[0].url}: expected at least {count} images, X of 32 x 32 x 3 x N bytes, found {kind}")
    for item in rows:
        yield item, encode(Image.fromarray(pixels[..., item.offset]))
