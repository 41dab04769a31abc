"""Read PASCAL VOC 2007 for classification, where an image can have several of 20 classes.

The label of an image is an integer whose bits stand for the classes; see `multilabel`.
"""

from functools import partial
from pathlib import PurePosixPath

from eagleray.datasets.multilabel import bits
from eagleray.datasets.sources import files, lists
from eagleray.datasets.sources.item import Listing, is_image
from eagleray.datasets.sources.options import PrepareOptions
from eagleray.datasets.sources.source import Dataset, Source, SourceFiles
from eagleray.storage.blob import Blob

CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)
LINE = r"(?P<name>\S+) +(?P<label>-?[01])"
MARKS = {1: 1, -1: 0, 0: -1}  # the data set's present, absent and difficult, and ours


def voc2007(options: PrepareOptions) -> SourceFiles:
    """Find JPEGImages/ and ImageSets/Main/ in the folder VOC2007, to which the archives of both splits unpack."""
    split = options.split or "trainval"
    blobs = {PurePosixPath(b.url).name: b for b in files.list_folder(f"{options.origin}/ImageSets/Main/")}
    names = [f"{c}_{split}.txt" for c in CLASSES]
    missing = [name for name in names if name not in blobs]
    images = [] if missing else [b for b in files.list_tree(f"{options.origin}/JPEGImages") if is_image(b.url)]
    if not images:
        expected = f"ImageSets/Main/{missing[0]} in it" if missing else "JPEGImages/ with images"
        raise files.missing_error(options.origin, expected)
    tables = [blobs[n] for n in names]
    return SourceFiles([*tables, *images], partial(_listing, tables, images))


def _listing(tables: list[Blob], images: list[Blob]) -> Listing:
    marks: dict[str, list[int]] = {}
    for c, table in enumerate(tables):
        for name, mark in lists.read_labels(table.url, LINE, "an image and 1, 0 or -1", range(-1, 2)):
            marks.setdefault(f"{name}.jpg", [0] * len(CLASSES))[c] = MARKS[mark]
    rows = ((name, bits(row)) for name, row in sorted(marks.items()))
    return Listing(lists.match_items(rows, {PurePosixPath(b.url).name: b for b in images}), CLASSES)


SOURCES = {
    "voc2007": Source(
        voc2007,
        licence="images under the terms of Flickr",
        dataset=Dataset(
            "PASCAL VOC 2007 (classification)",
            short="voc2007",
            classes=len(CLASSES),
            splits={"trainval": 5_011, "test": 4_952, "train": 2_501, "val": 2_510},
            obtain="Download VOCtrainval_06-Nov-2007.tar and VOCtest_06-Nov-2007.tar from "
            "host.robots.ox.ac.uk/pascal/VOC/voc2007",
            contents="`JPEGImages/`, `ImageSets/Main/`",
        ),
    )
}
