"""Oxford Flowers-102: numbered images, and MATLAB files with their classes and splits."""

from collections.abc import Iterator
from functools import partial

import numpy as np

from eagleray.base.errors import UserError
from eagleray.datasets.sources import files, lists, matlab
from eagleray.datasets.sources.item import Found, Listing, is_image
from eagleray.datasets.sources.job import Job
from eagleray.storage.blob import Blob

LABELS, SPLITS = "imagelabels.mat", "setid.mat"
NUMBERS = {"trainval": ("trnid", "valid"), "test": ("tstid",), "train": ("trnid",), "val": ("valid",)}


def flowers(job: Job) -> Found:
    """The folder that has jpg/, imagelabels.mat and setid.mat. Training is with both of its small splits, as usual."""
    here = {b.url.rpartition("/")[2]: b for b in files.directly(job.origin + "/")}
    images = [b for b in files.below(f"{job.origin}/jpg") if is_image(b.url)] if here else []
    missing = [name for name in (LABELS, SPLITS) if name not in here] or ["jpg/image_00001.jpg"] * (not images)
    if missing:
        raise files.nothing(job.origin, f"{missing[0]} in it")
    return Found([here[LABELS], here[SPLITS], *images], partial(_listing, job, images))


def _listing(job: Job, images: list[Blob]) -> Listing:
    return Listing(lists.items(_wanted(job), {files.relative(b, f"{job.origin}/jpg"): b for b in images}))


def _wanted(job: Job) -> Iterator[tuple[str, int]]:
    labels = matlab.arrays(f"{job.origin}/{LABELS}", "labels")[0].ravel()
    ids = matlab.arrays(f"{job.origin}/{SPLITS}", *NUMBERS[job.split or "trainval"])
    for number in np.sort(np.concatenate([i.ravel() for i in ids])).tolist():
        if not 1 <= number <= len(labels):
            raise UserError(f"{job.origin}/{SPLITS}: image {number} is none of the {len(labels)} of {LABELS}")
        yield f"image_{number:05d}.jpg", int(labels[number - 1]) - 1
