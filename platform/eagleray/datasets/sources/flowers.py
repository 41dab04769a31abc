"""Oxford Flowers-102: numbered images, and MATLAB files with their classes and splits."""

from collections.abc import Iterator
from functools import partial

import numpy as np

from eagleray.base.errors import UserError
from eagleray.datasets.sources import files, lists, matlab
from eagleray.datasets.sources.item import Listing, is_image
from eagleray.datasets.sources.options import PrepareOptions
from eagleray.datasets.sources.source import RESEARCH, Dataset, Source, SourceFiles
from eagleray.storage.blob import Blob

CLASSES = range(1, 103)
LABELS, SPLITS = "imagelabels.mat", "setid.mat"
NUMBERS = {"trainval": ("trnid", "valid"), "test": ("tstid",), "train": ("trnid",), "val": ("valid",)}


def flowers(options: PrepareOptions) -> SourceFiles:
    """Find jpg/, imagelabels.mat and setid.mat.

    As is usual, the default split joins the two small splits, train and val.
    """
    blobs = {b.url.rpartition("/")[2]: b for b in files.list_folder(options.origin + "/")}
    images = [b for b in files.list_tree(f"{options.origin}/jpg") if is_image(b.url)] if blobs else []
    missing = [name for name in (LABELS, SPLITS) if name not in blobs] or ["jpg/image_00001.jpg"] * (not images)
    if missing:
        raise files.missing_error(options.origin, f"{missing[0]} in it")
    return SourceFiles([blobs[LABELS], blobs[SPLITS], *images], partial(_listing, options, images))


def _listing(options: PrepareOptions, images: list[Blob]) -> Listing:
    blobs = {files.relative_path(b, f"{options.origin}/jpg"): b for b in images}
    return Listing(lists.match_items(_rows(options), blobs))


def _rows(options: PrepareOptions) -> Iterator[tuple[str, int]]:
    labels = matlab.read_numbers(f"{options.origin}/{LABELS}", ["labels"], CLASSES)[0]
    ids = matlab.read_numbers(f"{options.origin}/{SPLITS}", NUMBERS[options.split or "trainval"], range(1, 100_000))
    for number in np.sort(np.concatenate(ids)).tolist():
        if number > len(labels):
            raise UserError(
                f"{options.origin}/{SPLITS}: image {number} is not among the {len(labels)} images of {LABELS}"
            )
        yield f"image_{number:05d}.jpg", labels[number - 1].item() - 1


SOURCES = {
    "flowers-102": Source(
        flowers,
        licence=RESEARCH,
        dataset=Dataset(
            "Oxford Flowers-102",
            short="flowers",
            classes=len(CLASSES),
            splits={"trainval": 2_040, "test": 6_149, "train": 1_020, "val": 1_020},
            obtain="Download 102flowers.tgz, imagelabels.mat and setid.mat from robots.ox.ac.uk/~vgg/data/flowers/102",
            contents="`jpg/`, `imagelabels.mat`, `setid.mat`",
        ),
    )
}
