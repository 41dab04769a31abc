"""Read plain folders of images: any folder, Caltech-101, or the folders of COCO, whose annotations are not used."""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from eagleray.base.errors import UserError
from eagleray.data import image_folder
from eagleray.data.index_file import NAME as INDEX
from eagleray.datasets.sources import files
from eagleray.datasets.sources.item import Item, Listing, class_labels, is_image, key_and_extension
from eagleray.datasets.sources.lists import match_items
from eagleray.datasets.sources.source import PrepareOptions, SourceFiles
from eagleray.storage.blob import Blob

CALTECH, TRAIN_IMAGES = "101_ObjectCategories", 30


def folder(options: PrepareOptions) -> SourceFiles:
    """Find all images in a folder and its subfolders.

    The direct subfolders are the classes if there are at least two and every image is in one of them."""
    blobs, unread = _find(options.origin)
    if not blobs:
        raise files.missing_error(options.origin, "a folder with images in it or below it")
    return SourceFiles(blobs, partial(_listing, options.origin, blobs), unread=unread)


def coco(options: PrepareOptions) -> SourceFiles:
    """Find the images of a split of COCO in the folder below `origin` to which the split's zip file unpacks."""
    root = f"{options.origin}/{options.split}"
    blobs, unread = _find(root)
    if not blobs:
        raise files.missing_error(options.origin, f"a folder {root.rpartition('/')[2]}/ with images")
    return SourceFiles(blobs, lambda: Listing(_items(root, blobs)), unread=unread)


def _find(root: str) -> tuple[list[Blob], str]:
    """Return the images in a folder and below it, and text with the number of other files by extension."""
    blobs, others = [], Counter[str]()
    for blob in files.list_tree(root):
        path = files.relative_path(blob, root)
        if is_image(path) and not image_folder.is_hidden(path):
            blobs.append(blob)
        elif not image_folder.is_hidden(path) and path != INDEX:
            others[image_folder.extension(path)] += 1
    return blobs, image_folder.said(others)


def _listing(origin: str, blobs: Sequence[Blob]) -> Listing:
    tops = {files.relative_path(b, origin).rpartition("/")[0].partition("/")[0] for b in blobs}
    labels = class_labels(tops) if "" not in tops and len(tops) > 1 else {}
    return Listing(_items(origin, blobs, labels), list(labels))


def _items(origin: str, blobs: Sequence[Blob], labels: dict[str, int] | None = None) -> Iterator[Item]:
    for blob in blobs:
        name = files.relative_path(blob, origin)
        key, extension = key_and_extension(name)
        yield Item(key, blob.url, 0, blob.size, extension, (labels or {}).get(name.partition("/")[0], -1))


def caltech_101(options: PrepareOptions) -> SourceFiles:
    """Find 101_ObjectCategories/ in the folder. Its subfolder BACKGROUND_Google counts as the 102nd class.

    Caltech-101 has no splits. As is usual, 30 random images of each class are for training, the others for testing."""
    root = f"{options.origin}/{CALTECH}"
    images = files.by_path((b for b in files.list_tree(root) if is_image(b.url)), root)
    if not images:
        raise files.missing_error(options.origin, f"{CALTECH}/ with class folders in it")

    def listing() -> Listing:
        classes: dict[str, list[str]] = {}
        for name, blob in images.items():
            if name.count("/") != 1:
                raise UserError(f"{blob.url}: not in a class folder; expected {CALTECH}/CLASS/IMAGE")
            classes.setdefault(name.partition("/")[0], []).append(name)
        return Listing(match_items(_of_split(classes, options.split), images), list(class_labels(classes)))

    return SourceFiles(list(images.values()), listing)


def _of_split(classes: dict[str, list[str]], split: str) -> Iterator[tuple[str, int]]:
    for label, (_, names) in enumerate(sorted(classes.items())):
        train = set(np.random.default_rng(label).permutation(len(names))[:TRAIN_IMAGES].tolist())
        yield from ((name, label) for i, name in enumerate(names) if (i in train) == (split == "train"))
