"""Read the cropped digits of SVHN: MATLAB arrays of 32 x 32 images, in which the digit 0 has the label 10."""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
from PIL import Image

from eagleray.base.errors import UserError
from eagleray.datasets.shards import encode
from eagleray.datasets.sources import files, matlab
from eagleray.datasets.sources.item import Item, Listing
from eagleray.datasets.sources.options import PrepareOptions
from eagleray.datasets.sources.source import Dataset, Source, SourceFiles
from eagleray.storage.blob import Blob

ARRAY = "array"  # extension of items whose bytes are raw pixels; their offset is the position in the array
BYTES = 3 * 32**2


def svhn(options: PrepareOptions) -> SourceFiles:
    """Find train_32x32.mat or test_32x32.mat in the folder."""
    name = f"{options.split or 'train'}_32x32.mat"
    blobs = [b for b in files.list_folder(options.origin + "/") if b.url.endswith(f"/{name}")]
    if not blobs:
        raise files.missing_error(options.origin, f"{name} in it")
    return SourceFiles(blobs, partial(_listing, blobs[0]), read_images)


def _listing(blob: Blob) -> Listing:
    return Listing(_items(blob), [str(digit) for digit in range(10)])


def _items(blob: Blob) -> Iterator[Item]:
    [labels] = matlab.read_numbers(blob.url, ["y"], range(1, 11))
    stem = blob.url.rpartition("/")[2].partition("_")[0]
    for i, label in enumerate(labels.tolist()):
        yield Item(f"{stem}/{i:06d}", blob.url, i, BYTES, ARRAY, label % 10)


def read_images(rows: Sequence[Item]) -> Iterator[tuple[Item, bytes]]:
    """Yield the items of one MATLAB file with their images as PNGs. The whole file is read into memory."""
    [pixels] = matlab.read_arrays(rows[0].url, "X")  # (32, 32, 3, N)
    count = max(item.offset for item in rows) + 1
    if pixels.dtype != np.uint8 or pixels.shape[:-1] != (32, 32, 3) or pixels.shape[-1] < count:
        kind = f"{' x '.join(map(str, pixels.shape))} of type {pixels.dtype}"
        raise UserError(f"{rows[0].url}: expected at least {count} images, X of 32 x 32 x 3 x N bytes, found {kind}")
    for item in rows:
        yield item, encode(Image.fromarray(pixels[..., item.offset]))


SOURCES = {
    "svhn": Source(
        svhn,
        licence="non-commercial use only",
        dataset=Dataset(
            "SVHN",
            short="svhn",
            classes=10,
            splits={"train": 73_257, "test": 26_032},
            obtain="Download train_32x32.mat and test_32x32.mat from ufldl.stanford.edu/housenumbers",
            contents="`train_32x32.mat`, `test_32x32.mat`",
        ),
    )
}
