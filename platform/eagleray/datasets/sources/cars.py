"""Stanford Cars: numbered images, and MATLAB structures with their classes."""

from collections.abc import Iterator

from eagleray.base.errors import UserError
from eagleray.datasets.sources import files, lists, matlab
from eagleray.datasets.sources.item import Listing, is_image
from eagleray.datasets.sources.options import PrepareOptions
from eagleray.datasets.sources.source import Dataset, Source, SourceFiles
from eagleray.storage.blob import Blob

CLASSES = range(1, 197)
TABLES = {"train": "cars_train_annos.mat", "test": "cars_test_annos_withlabels.mat"}


def cars(options: PrepareOptions) -> SourceFiles:
    """Find cars_train/, cars_test/ and devkit/, and the labels of the test images in or beside devkit/."""
    split = options.split or "train"
    tables = [b for b in files.list_tree(options.origin) if b.url.endswith(f"/{TABLES[split]}")]
    images = [b for b in files.list_tree(f"{options.origin}/cars_{split}") if is_image(b.url)] if tables else []
    if not images:
        missing = f"cars_{split}/00001.jpg in it" if tables else f"devkit/{TABLES[split]} in it"
        raise files.missing_error(options.origin, missing)
    blobs = {b.url.rpartition("/")[2]: b for b in images}
    return SourceFiles([tables[0], *images], lambda: Listing(lists.match_items(_rows(tables[0]), blobs)))


def _rows(table: Blob) -> Iterator[tuple[str, int]]:
    [annotations] = matlab.read_arrays(table.url, "annotations")
    try:
        rows = [(str(r["fname"].item()), int(r["class"].item())) for r in annotations.ravel()]
    except (ValueError, IndexError, AttributeError, TypeError, OverflowError):
        raise UserError(f"{table.url}: expected annotations with the fields fname and class") from None
    wrong = [label for _, label in rows if label not in CLASSES]
    if wrong:
        raise UserError(f"{table.url}: expected classes of 1 to {len(CLASSES)}, found {wrong[0]:.3g}")
    return ((name, label - 1) for name, label in rows)


SOURCES = {
    "cars": Source(
        cars,
        licence="non-commercial research only",
        dataset=Dataset(
            "Stanford Cars",
            short="cars",
            classes=len(CLASSES),
            splits={"train": 8_144, "test": 8_041},
            obtain="Download cars_train.tgz, cars_test.tgz, car_devkit.tgz and cars_test_annos_withlabels.mat from "
            "ai.stanford.edu/~jkrause/cars",
            contents="`cars_train/`, `cars_test/`, `devkit/`, `cars_test_annos_withlabels.mat`",
        ),
    )
}
