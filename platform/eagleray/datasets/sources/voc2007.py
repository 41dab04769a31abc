"""PASCAL VOC 2007, classification: an image has any of 20 classes, so its label is a number of as many bits."""

from functools import partial
from pathlib import PurePosixPath

from eagleray.datasets.multilabel import bits
from eagleray.datasets.sources import files, lists
from eagleray.datasets.sources.item import Found, Listing, is_image
from eagleray.datasets.sources.job import Job
from eagleray.storage.blob import Blob

CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)
LINE = r"(?P<name>\S+) +(?P<label>-?[01])"
MARKS = {1: 1, -1: 0, 0: -1}  # theirs: there, not there, hard to tell; and ours


def voc2007(job: Job) -> Found:
    """The folder VOC2007 that has JPEGImages/ and ImageSets/Main/, of both archives."""
    split = job.split or "trainval"
    here = {PurePosixPath(b.url).name: b for b in files.directly(f"{job.origin}/ImageSets/Main/")}
    names = [f"{c}_{split}.txt" for c in CLASSES]
    missing = [name for name in names if name not in here]
    images = [] if missing else [b for b in files.below(f"{job.origin}/JPEGImages") if is_image(b.url)]
    if not images:
        raise files.nothing(job.origin, f"ImageSets/Main/{missing[0]} in it" if missing else "JPEGImages/ with images")
    return Found([*(here[n] for n in names), *images], partial(_listing, [here[n] for n in names], images))


def _listing(blobs: list[Blob], images: list[Blob]) -> Listing:
    marks: dict[str, list[int]] = {}
    for c, blob in enumerate(blobs):
        for name, mark in lists.labelled(blob.url, LINE, "an image and 1, 0 or -1"):
            marks.setdefault(f"{name}.jpg", [0] * len(CLASSES))[c] = MARKS[mark]
    wanted = ((name, bits(row)) for name, row in sorted(marks.items()))
    return Listing(lists.items(wanted, {PurePosixPath(b.url).name: b for b in images}), CLASSES)
