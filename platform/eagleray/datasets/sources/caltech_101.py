"""Caltech-101: class folders without splits. As usual 30 images of each class, drawn, are to learn from."""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from eagleray.base.errors import UserError
from eagleray.datasets.sources import files
from eagleray.datasets.sources.item import Found, Item, Listing, is_image, named, numbered
from eagleray.datasets.sources.job import Job
from eagleray.storage.blob import Blob

FOLDER, OF_EACH = "101_ObjectCategories", 30


def caltech_101(job: Job) -> Found:
    """The folder that has 101_ObjectCategories/, whose BACKGROUND_Google is the 102nd class."""
    place = f"{job.origin}/{FOLDER}"
    blobs = [b for b in files.below(place) if is_image(b.url)]
    if not blobs:
        raise files.nothing(job.origin, f"{FOLDER}/ with class folders in it")
    return Found(blobs, partial(_listing, place, blobs, job.split or "train"))


def _listing(place: str, blobs: Sequence[Blob], split: str) -> Listing:
    groups: dict[str, list[Blob]] = {}
    for blob in blobs:
        name = files.relative(blob, place)
        if name.count("/") != 1:
            raise UserError(f"{blob.url}: expected CLASS/IMAGE below {FOLDER}/")
        groups.setdefault(name.partition("/")[0], []).append(blob)
    return Listing(_items(place, groups, split), list(numbered(groups)))


def _items(place: str, groups: dict[str, list[Blob]], split: str) -> Iterator[Item]:
    for name, label in numbered(groups).items():
        blobs = groups[name]
        drawn = set(np.random.default_rng(label).permutation(len(blobs))[:OF_EACH].tolist())
        for i, blob in enumerate(blobs):
            if (i in drawn) == (split == "train"):
                key, extension = named(files.relative(blob, place))
                yield Item(key, blob.url, 0, blob.size, extension, label)
