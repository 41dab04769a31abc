"""Read Caltech-101, which has class folders but no splits: 30 random images of each class are for training, as is
usual.
"""

from collections.abc import Iterator

import numpy as np

from eagleray.base.errors import UserError
from eagleray.datasets.sources import files
from eagleray.datasets.sources.item import Listing, class_labels, is_image
from eagleray.datasets.sources.lists import match_items
from eagleray.datasets.sources.options import PrepareOptions
from eagleray.datasets.sources.source import SourceFiles

FOLDER, TRAIN_IMAGES = "101_ObjectCategories", 30


def caltech_101(options: PrepareOptions) -> SourceFiles:
    """Find 101_ObjectCategories/ in the folder. Its subfolder BACKGROUND_Google counts as the 102nd class."""
    root = f"{options.origin}/{FOLDER}"
    images = files.by_path((b for b in files.list_tree(root) if is_image(b.url)), root)
    if not images:
        raise files.missing_error(options.origin, f"{FOLDER}/ with class folders in it")

    def listing() -> Listing:
        classes: dict[str, list[str]] = {}
        for name, blob in images.items():
            if name.count("/") != 1:
                raise UserError(f"{blob.url}: not in a class folder; expected {FOLDER}/CLASS/IMAGE")
            classes.setdefault(name.partition("/")[0], []).append(name)
        return Listing(match_items(_rows(classes, options.split), images), list(class_labels(classes)))

    return SourceFiles(list(images.values()), listing)


def _rows(classes: dict[str, list[str]], split: str) -> Iterator[tuple[str, int]]:
    for label, (_, names) in enumerate(sorted(classes.items())):
        train = set(np.random.default_rng(label).permutation(len(names))[:TRAIN_IMAGES].tolist())
        yield from ((name, label) for i, name in enumerate(names) if (i in train) == (split == "train"))
