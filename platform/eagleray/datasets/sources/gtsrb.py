"""GTSRB, German traffic signs: class folders of training images, and a CSV with the classes of the test images."""

import csv
from functools import partial
from pathlib import PurePosixPath

from eagleray.base.errors import UserError
from eagleray.datasets.sources import files, lists
from eagleray.datasets.sources.item import Found, Listing, is_image
from eagleray.datasets.sources.job import Job
from eagleray.storage.blob import Blob

TRUTH = "GT-final_test.csv"
CLASSES = 43


def gtsrb(job: Job) -> Found:
    """The folder GTSRB: Training/00000/*.ppm of GTSRB-Training_fixed.zip, Final_Test/Images/*.ppm of
    GTSRB_Final_Test_Images.zip, and GT-final_test.csv, anywhere in it, of GTSRB_Final_Test_GT.zip."""
    if job.split == "test":
        truth = [b for b in files.below(job.origin) if b.url.endswith(f"/{TRUTH}")]
        images = [b for b in files.below(f"{job.origin}/Final_Test/Images") if is_image(b.url)] if truth else []
        if not images:
            raise files.nothing(job.origin, "Final_Test/Images/00000.ppm in it" if truth else f"{TRUTH} in it")
        return Found([truth[0], *images], partial(_test, truth[0], images))
    images = [b for b in files.below(f"{job.origin}/Training") if is_image(b.url)]
    if not images:
        raise files.nothing(job.origin, "Training/00000/00000_00000.ppm in it")
    return Found(images, partial(_train, f"{job.origin}/Training", images))


def _train(place: str, images: list[Blob]) -> Listing:
    places = {files.relative(b, place): b for b in images}
    return Listing(lists.items([(name, _label(PurePosixPath(name).parent.name, name)) for name in places], places))


def _test(truth: Blob, images: list[Blob]) -> Listing:
    rows = list(csv.DictReader(files.text(truth.url).splitlines(), delimiter=";"))
    if not rows or not {"Filename", "ClassId"} <= rows[0].keys():
        raise UserError(f"{truth.url}: expected columns Filename and ClassId, parted by semicolons")
    places = {PurePosixPath(b.url).name: b for b in images}
    return Listing(lists.items([(r["Filename"], _label(r["ClassId"], truth.url)) for r in rows], places))


def _label(text: str | None, place: str) -> int:
    if not text or not text.isdigit() or int(text) >= CLASSES:
        raise UserError(f"{place}: expected a class of 0 to {CLASSES - 1}, found {text!r}")
    return int(text)
