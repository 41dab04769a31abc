"""SVHN, cropped digits: MATLAB arrays of 32 x 32 images, in which class 10 is the digit 0."""

from collections.abc import Iterator, Sequence
from functools import partial

from PIL import Image

from eagleray.base.errors import UserError
from eagleray.datasets.shards import encode
from eagleray.datasets.sources import files, matlab
from eagleray.datasets.sources.item import Found, Item, Listing
from eagleray.datasets.sources.job import Job
from eagleray.storage.blob import Blob

ARRAY = "array"  # the extension of such an image, which is no file yet; its offset is its place in the array
BYTES = 3 * 32**2


def svhn(job: Job) -> Found:
    """The folder that has train_32x32.mat and test_32x32.mat."""
    name = f"{job.split or 'train'}_32x32.mat"
    here = [b for b in files.directly(job.origin + "/") if b.url.endswith(f"/{name}")]
    if not here:
        raise files.nothing(job.origin, f"{name} in it")
    return Found(here, partial(_listing, here[0]))


def _listing(blob: Blob) -> Listing:
    return Listing(_items(blob), [str(digit) for digit in range(10)])


def _items(blob: Blob) -> Iterator[Item]:
    labels = matlab.arrays(blob.url, "y")[0].ravel()
    if labels.min(initial=1) < 1 or labels.max(initial=1) > 10:
        raise UserError(f"{blob.url}: expected labels of 1 to 10, found {labels.min()} to {labels.max()}")
    stem = blob.url.rpartition("/")[2].partition("_")[0]
    for i, label in enumerate(labels.tolist()):
        yield Item(f"{stem}/{i:06d}", blob.url, i, BYTES, ARRAY, label % 10)


def images(rows: Sequence[Item]) -> Iterator[tuple[Item, bytes]]:
    """The PNGs of items of one file, which is read as a whole."""
    [pixels] = matlab.arrays(rows[0].url, "X")  # (32, 32, 3, N)
    for item in rows:
        yield item, encode(Image.fromarray(pixels[..., item.offset]))
