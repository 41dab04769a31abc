"""Read the cropped digits of SVHN: MATLAB arrays of 32 x 32 images, in which the digit 0 has the label 10."""

from collections.abc import Iterator, Sequence
from functools import partial

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
    labels = matlab.read_arrays(blob.url, "y")[0].ravel()
    if labels.min(initial=1) < 1 or labels.max(initial=1) > 10:
        raise UserError(f"{blob.url}: expected labels of 1 to 10, found {labels.min()} to {labels.max()}")
    stem = blob.url.rpartition("/")[2].partition("_")[0]
    for i, label in enumerate(labels.tolist()):
        yield Item(f"{stem}/{i:06d}", blob.url, i, BYTES, ARRAY, label % 10)


def read_images(rows: Sequence[Item]) -> Iterator[tuple[Item, bytes]]:
    """Yield the items of one MATLAB file with their images as PNGs. The whole file is read into memory."""
    [pixels] = matlab.read_arrays(rows[0].url, "X")  # (32, 32, 3, N)
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
