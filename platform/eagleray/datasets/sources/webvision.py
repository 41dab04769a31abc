"""WebVision 1.0: lists of images with their classes, and the folders that its archives unpack to."""

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import PurePosixPath

from eagleray.base.errors import UserError
from eagleray.datasets.sources import files
from eagleray.datasets.sources.item import Found, Item, Listing, is_image, named
from eagleray.datasets.sources.job import Job
from eagleray.storage.blob import Blob

LISTS = {
    "train": ("train_filelist_google.txt", "train_filelist_flickr.txt"),
    "val": ("val_filelist.txt",),
    "test": ("test_filelist.txt",),
}


def webvision(job: Job) -> Found:
    """The folder that has info/, and google/ and flickr/ or the folder of the validation images."""
    split = job.split or "train"
    blobs = files.below(job.origin)
    lists = [b for b in blobs if files.relative(b, job.origin) in {f"info/{name}" for name in LISTS[split]}]
    if not lists:
        raise files.nothing(job.origin, f"info/{LISTS[split][0]} in it")
    images = [b for b in blobs if is_image(b.url)]
    return Found([*lists, *images], partial(_listing, job.origin, lists, images, split))


def _listing(origin: str, lists: Sequence[Blob], images: Sequence[Blob], split: str) -> Listing:
    try:
        classes = [line.split()[0] for line in files.text(f"{origin}/info/synsets.txt").splitlines() if line.strip()]
    except UserError:  # the lists hold numbers, so the names are not needed
        classes = []
    return Listing(_items(origin, lists, images, split), classes)


def _items(origin: str, lists: Sequence[Blob], images: Sequence[Blob], split: str) -> Iterator[Item]:
    """Lists of training images hold paths; those of others file names, in a folder whose name tells how the images
    were resized."""
    places = {_place(files.relative(b, origin), split): b for b in images}
    lines = itertools.chain.from_iterable(_lines(blob, labelled=split != "test") for blob in lists)
    for name, label in lines:
        key, extension = named(name)
        blob = places.get(_place(name, split))
        if blob is None:
            yield Item(key, "", 0, 0, reason="listed, but not among the files")
        else:
            yield Item(key, blob.url, 0, blob.size, extension, label)


def _place(name: str, split: str) -> str:
    return name if split == "train" else PurePosixPath(name).name


def _lines(blob: Blob, *, labelled: bool) -> Iterator[tuple[str, int]]:
    for number, line in enumerate(files.text(blob.url).splitlines(), 1):
        name, _, label = line.strip().rpartition(" ") if labelled else (line.split()[0] if line.strip() else "", "", "")
        if not line.strip():
            continue
        if labelled and not (name and label.isdigit()):
            raise UserError(
                f"{blob.url}: line {number}: expected a path and a class number, found {line.strip()[:80]!r}"
            )
        yield name, int(label) if labelled else -1
