"""Stanford Cars: numbered images, and MATLAB structures with their classes."""

from collections.abc import Iterator

from eagleray.base.errors import UserError
from eagleray.datasets.sources import files, lists, matlab
from eagleray.datasets.sources.item import Found, Listing, is_image
from eagleray.datasets.sources.job import Job
from eagleray.storage.blob import Blob

TABLES = {"train": "cars_train_annos.mat", "test": "cars_test_annos_withlabels.mat"}


def cars(job: Job) -> Found:
    """The folder that has cars_train/, cars_test/, devkit/ and, in either place, the labels of the test images."""
    split = job.split or "train"
    tables = [b for b in files.below(job.origin) if b.url.endswith(f"/{TABLES[split]}")]
    images = [b for b in files.below(f"{job.origin}/cars_{split}") if is_image(b.url)] if tables else []
    if not images:
        raise files.nothing(job.origin, f"cars_{split}/00001.jpg in it" if tables else f"devkit/{TABLES[split]} in it")
    places = {b.url.rpartition("/")[2]: b for b in images}
    return Found([tables[0], *images], lambda: Listing(lists.items(_wanted(tables[0]), places)))


def _wanted(table: Blob) -> Iterator[tuple[str, int]]:
    [rows] = matlab.arrays(table.url, "annotations")
    try:
        pairs = [(str(r["fname"].item()), int(r["class"].item()) - 1) for r in rows.ravel()]
    except (ValueError, IndexError, AttributeError, TypeError):
        raise UserError(f"{table.url}: expected annotations with the fields fname and class") from None
    return iter(pairs)
