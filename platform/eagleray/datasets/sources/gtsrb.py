"""GTSRB, German traffic signs: class folders of training images, and a CSV with the classes of the test images."""

import re
from functools import partial
from pathlib import PurePosixPath

from eagleray.base.errors import UserError
from eagleray.datasets.sources import files, lists
from eagleray.datasets.sources.item import Listing, is_image
from eagleray.datasets.sources.options import PrepareOptions
from eagleray.datasets.sources.source import RESEARCH, Dataset, Source, SourceFiles
from eagleray.storage.blob import Blob

TRUTH = "GT-final_test.csv"
CLASSES = 43


def gtsrb(options: PrepareOptions) -> SourceFiles:
    """Find the files of a split in the folder GTSRB.

    Training images are Training/00000/*.ppm, ... from GTSRB-Training_fixed.zip. Test images are Final_Test/Images/*.ppm
    from GTSRB_Final_Test_Images.zip, and their classes are in GT-final_test.csv from GTSRB_Final_Test_GT.zip. The CSV
    may lie anywhere in the folder.
    """
    if options.split == "test":
        truth = [b for b in files.list_tree(options.origin) if b.url.endswith(f"/{TRUTH}")]
        folder = f"{options.origin}/Final_Test/Images"
        images = [b for b in files.list_tree(folder) if is_image(b.url)] if truth else []
        if not images:
            missing = "Final_Test/Images/00000.ppm in it" if truth else f"{TRUTH} in it"
            raise files.missing_error(options.origin, missing)
        return SourceFiles([truth[0], *images], partial(_test, truth[0], images))
    images = [b for b in files.list_tree(f"{options.origin}/Training") if is_image(b.url)]
    if not images:
        raise files.missing_error(options.origin, "Training/00000/00000_00000.ppm in it")
    return SourceFiles(images, partial(_train, f"{options.origin}/Training", images))


def _train(root: str, images: list[Blob]) -> Listing:
    blobs = {files.relative_path(b, root): b for b in images}
    return Listing(lists.match_items([(name, _label(PurePosixPath(name).parent.name, name)) for name in blobs], blobs))


def _test(truth: Blob, images: list[Blob]) -> Listing:
    rows = files.read_csv(truth.url, ";")
    if not rows or not {"Filename", "ClassId"} <= rows[0].keys():
        raise UserError(f"{truth.url}: expected columns Filename and ClassId, separated by semicolons")
    blobs = {PurePosixPath(b.url).name: b for b in images}
    return Listing(lists.match_items([(r["Filename"], _label(r["ClassId"], truth.url)) for r in rows], blobs))


def _label(text: str, file: str) -> int:
    if not re.fullmatch("[0-9]{1,5}", text) or int(text) >= CLASSES:
        raise UserError(f"{file}: expected a class of 0 to {CLASSES - 1}, found {text[:80]!r}")
    return int(text)


SOURCES = {
    "gtsrb": Source(
        gtsrb,
        licence=RESEARCH,
        dataset=Dataset(
            "GTSRB",
            short="gtsrb",
            classes=CLASSES,
            splits={"train": 26_640, "test": 12_630},
            obtain="Download GTSRB-Training_fixed.zip, GTSRB_Final_Test_Images.zip and GTSRB_Final_Test_GT.zip from "
            "benchmark.ini.rub.de",
            contents="`Training/`, `Final_Test/Images/`, `GT-final_test.csv`",
        ),
    )
}
