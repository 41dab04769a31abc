"""Read Caltech-101, which has class folders but no splits: 30 random images of each class are for training, as is
usual.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from eagleray.base.errors import UserError
from eagleray.datasets.sources import files
from eagleray.datasets.sources.item import Item, Listing, class_labels, is_image, key_and_extension
from eagleray.datasets.sources.options import PrepareOptions
from eagleray.datasets.sources.source import Dataset, Source, SourceFiles
from eagleray.storage.blob import Blob

FOLDER, TRAIN_IMAGES = "101_ObjectCategories", 30


def caltech_101(options: PrepareOptions) -> SourceFiles:
    """Find 101_ObjectCategories/ in the folder. Its subfolder BACKGROUND_Google counts as the 102nd class."""
    root = f"{options.origin}/{FOLDER}"
    blobs = [b for b in files.list_tree(root) if is_image(b.url)]
    if not blobs:
        raise files.missing_error(options.origin, f"{FOLDER}/ with class folders in it")
    return SourceFiles(blobs, partial(_listing, root, blobs, options.split or "train"))


def _listing(root: str, blobs: Sequence[Blob], split: str) -> Listing:
    groups: dict[str, list[Blob]] = {}
    for blob in blobs:
        name = files.relative_path(blob, root)
        if name.count("/") != 1:
            raise UserError(f"{blob.url}: not in a class folder; expected {FOLDER}/CLASS/IMAGE")
        groups.setdefault(name.partition("/")[0], []).append(blob)
    return Listing(_items(root, groups, split), list(class_labels(groups)))


def _items(root: str, groups: dict[str, list[Blob]], split: str) -> Iterator[Item]:
    for name, label in class_labels(groups).items():
        blobs = groups[name]
        train = set(np.random.default_rng(label).permutation(len(blobs))[:TRAIN_IMAGES].tolist())
        for i, blob in enumerate(blobs):
            if (i in train) == (split == "train"):
                key, extension = key_and_extension(files.relative_path(blob, root))
                yield Item(key, blob.url, 0, blob.size, extension, label)


SOURCES = {
    "caltech-101": Source(
        caltech_101,
        licence="CC BY 4.0; the images belong to their owners",
        dataset=Dataset(
            "Caltech-101",
            short="caltech101",
            classes=102,
            splits={"train": 3_060, "test": 6_084},
            obtain="Download caltech-101.zip from data.caltech.edu; 101_ObjectCategories.tar.gz is in it",
            contents="`101_ObjectCategories/`",
        ),
    )
}
