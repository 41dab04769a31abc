"""WebVision 1.0: lists of images with their classes, and the folders that its archives unpack to."""

import itertools
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import PurePosixPath

from eagleray.base.errors import UserError
from eagleray.datasets.sources import files, lists
from eagleray.datasets.sources.item import Item, Listing, is_image, key_and_extension
from eagleray.datasets.sources.options import PrepareOptions
from eagleray.datasets.sources.source import Source, SourceFiles
from eagleray.storage.blob import Blob

LISTS = {
    "train": ("train_filelist_google.txt", "train_filelist_flickr.txt"),
    "val": ("val_filelist.txt",),
    "test": ("test_filelist.txt",),
}


def webvision(options: PrepareOptions) -> SourceFiles:
    """Find info/ and the images of a split: google/ and flickr/ for training, or else the folder of its images."""
    split = options.split or "train"
    blobs = files.list_tree(options.origin)
    tables = [b for b in blobs if files.relative_path(b, options.origin) in {f"info/{name}" for name in LISTS[split]}]
    if not tables:
        raise files.missing_error(options.origin, f"info/{LISTS[split][0]} in it")
    images = [b for b in blobs if is_image(b.url)]
    return SourceFiles([*tables, *images], partial(_listing, options.origin, tables, images, split))


def _listing(origin: str, tables: Sequence[Blob], images: Sequence[Blob], split: str) -> Listing:
    try:
        lines = files.read_text(f"{origin}/info/synsets.txt").splitlines()
    except UserError:  # the lists hold class numbers, so the names can be missing
        lines = []
    classes = [line.split()[0] for line in lines if line.strip()]
    return Listing(_items(origin, tables, images, split), classes)


def _items(origin: str, tables: Sequence[Blob], images: Sequence[Blob], split: str) -> Iterator[Item]:
    blobs = {_list_name(files.relative_path(b, origin), split): b for b in images}
    rows = itertools.chain.from_iterable(_rows(table, has_labels=split != "test") for table in tables)
    for name, label in rows:
        key, extension = key_and_extension(name)
        blob = blobs.get(_list_name(name, split))
        if blob is None:
            yield Item(key, "", 0, 0, reason="listed, but not among the files")
        else:
            yield Item(key, blob.url, 0, blob.size, extension, label)


def _list_name(path: str, split: str) -> str:
    """Return the name by which a list refers to an image: the path of a training image, the file name of any other.

    The folder of the other images depends on how they were resized, and the lists do not name it.
    """
    return path if split == "train" else PurePosixPath(path).name


def _rows(table: Blob, *, has_labels: bool) -> Iterator[tuple[str, int]]:
    for number, line in enumerate(files.read_text(table.url).splitlines(), 1):
        if not line.strip():
            continue
        name, _, label = line.strip().rpartition(" ") if has_labels else (line.split()[0], "", "")
        if has_labels and not (name and re.fullmatch(f"[0-9]{{1,{lists.DIGITS}}}", label)):
            raise UserError(
                f"{table.url}: line {number}: expected a path and a class number, found {line.strip()[:80]!r}"
            )
        yield name, int(label) if has_labels else -1


SOURCES = {
    "webvision": Source(
        webvision,
        licence="WebVision terms: non-commercial research; the images belong to their owners",
        splits=("train", "val", "test"),
    )
}
