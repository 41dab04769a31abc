"""Read PatchCamelyon: patches of 96 x 96 pixels and their labels, in HDF5 files (Veeling et al. 2018)."""

import io
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from PIL import Image

from eagleray.base.errors import UserError, explained
from eagleray.datasets.shards import encode
from eagleray.datasets.sources import files
from eagleray.datasets.sources.item import Item, Listing
from eagleray.datasets.sources.raw_pixels import RAW
from eagleray.datasets.sources.source import Data, PrepareOptions, SourceFiles
from eagleray.storage.blob import Blob
from eagleray.storage.range_file import READ, RangeFile, Span

STEM = "camelyonpatch_level_2_split_"
PARTS = {"trainval": ("train", "valid"), "test": ("test",), "train": ("train",), "val": ("valid",)}
SHAPE = (96, 96, 3)
MOST = 1024  # most patches in memory at once


def pcam(options: PrepareOptions) -> SourceFiles:
    """Find the files of patches and of labels of a split."""
    parts = PARTS[options.split]
    names = [f"{STEM}{part}_{kind}.h5" for part in parts for kind in "xy"]
    blobs = files.pick(options.origin, files.by_name(files.list_folder(options.origin + "/")), names, "{}.gz")

    def listing() -> Listing:
        pairs = zip(parts, blobs[::2], blobs[1::2], strict=True)
        return Listing((item for pair in pairs for item in _items(*pair)), ("no tumour", "tumour"))

    return SourceFiles(blobs, listing, read)


def _items(part: str, images: Blob, labels: Blob) -> Iterator[Item]:
    x, y = _dataset(images.url, images.size, "x"), np.asarray(_dataset(labels.url, labels.size, "y")[:]).ravel()
    if x.shape[1:] != SHAPE or x.dtype != np.uint8 or len(y) != len(x) or not np.isin(y, (0, 1)).all():
        raise UserError(
            f"{images.url}: expected patches of 96 x 96 x 3 bytes, and a label of 0 or 1 of each in {labels.url}"
        )
    rows = _rows_of_chunk(x)
    for i, label in enumerate(y.tolist()):
        group = i // rows if rows > 1 else -1
        yield Item(f"{part}/{i:06d}", images.url, i, int(np.prod(SHAPE)), RAW, int(label), group)


def read(items: Sequence[Item]) -> Iterator[tuple[Item, Data]]:
    """Yield every item with its patch as a PNG. Patches that are compressed together, as a chunk of the HDF5 file, are
    read together, whatever the order of the items."""
    images: list[Data] = [b""] * len(items)
    by_place = sorted(range(len(items)), key=lambda i: (items[i].url, items[i].offset))
    for url, of_file in groupby(by_place, key=lambda i: items[i].url):
        x = _dataset(url, files.find_file(url).size, "x")
        rows = _rows_of_chunk(x)
        for first, of_chunk in groupby(of_file, key=lambda i: items[i].offset // rows * rows):
            patches = x[first : first + rows]
            for i in of_chunk:
                images[i] = encode(Image.fromarray(patches[items[i].offset - first]))
    return zip(items, images, strict=True)


def _rows_of_chunk(x: Any) -> int:
    return min(x.chunks[0], MOST) if x.chunks else 1


def _dataset(url: str, size: int, name: str) -> Any:
    """Open the data set `name` of an HDF5 file, local or by URL. Raises UserError without h5py or this data set."""
    missing = "pcam: its files need h5py, which is not installed: pip install 'eagleray[hdf5]'"
    with explained(missing, ImportError, why=False):
        import h5py
    with explained(f"{url}: expected an HDF5 file with {name}", OSError, KeyError, ValueError, RuntimeError):
        return h5py.File(io.BufferedReader(RangeFile(Span("", url, 0, size)), READ), "r")[name]
