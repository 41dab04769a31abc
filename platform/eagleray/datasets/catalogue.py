"""All sources that `eagleray prepare` reads, and all data sets that recipes name.

A source is described in its own file in `sources/`, which is listed in MODULES here.
"""

from pathlib import Path

from eagleray.base.errors import UserError
from eagleray.config import register
from eagleray.datasets.sources import (
    caltech_101,
    cars,
    cifar,
    domainnet,
    fer2013,
    flowers,
    folder,
    gtsrb,
    hateful_memes,
    imagenet,
    imagenet_subsets,
    mnist,
    openimages,
    parquet,
    path_lists,
    pcam,
    pets,
    stl10,
    svhn,
    ucf101,
    voc2007,
    webdataset,
    webvision,
)
from eagleray.datasets.sources.options import PrepareOptions
from eagleray.datasets.sources.source import OWN, Dataset, Source, SourceFiles

MODULES = (
    imagenet,
    imagenet_subsets,
    openimages,
    webvision,
    cifar,
    flowers,
    pets,
    svhn,
    path_lists,
    cars,
    voc2007,
    caltech_101,
    mnist,
    fer2013,
    stl10,
    gtsrb,
    pcam,
    ucf101,
    hateful_memes,
    domainnet,
    folder,
    webdataset,
    parquet,
)
SHIPPED: dict[str, Source] = {name: source for module in MODULES for name, source in module.SOURCES.items()}
SOURCES = register.Registry(
    "source", SHIPPED, lambda entry: Source(entry.target, **{"licence": OWN, "splits": ("all",)} | entry.details)
)

SHARDS = "It comes as shards, which are used as they are"
# Data sets whose files `eagleray prepare` does not read.
OTHERS = {
    "mnist-small": Dataset(
        "MNIST (2,000 of its test images)",
        short="mnist",
        classes=10,
        splits={"train": 1_500, "test": 500},
        obtain=SHARDS,
        contents="",
    ),
    "fer2013-small": Dataset(
        "FER2013 (1,400 faces)",
        short="fer2013",
        classes=7,
        splits={"train": 1_050, "test": 350},
        obtain=SHARDS,
        contents="",
    ),
    "food101-small": Dataset(
        "Food-101 (1,717 images of 64 pixels)",
        short="food101",
        classes=101,
        splits={"train": 1_212, "test": 505},
        obtain=SHARDS,
        contents="",
    ),
}
DATASETS = {name: source.dataset for name, source in SOURCES.items() if source.dataset} | OTHERS


def find(options: PrepareOptions) -> SourceFiles:
    """Find the files of the source that the options name.

    Raises UserError when the source is unknown, when its files are missing, or when an option does not apply to it.
    """
    source = SOURCES.get(options.source)
    if source is None:
        raise UserError(f"SOURCE {options.source}: unknown; expected one of {', '.join(SOURCES)}")
    if options.split and options.split not in source.split_names:
        names = ", ".join(source.split_names)
        raise UserError(
            f"--split {options.split}: {f'expected {names}' if names else f'{options.source} has no splits'}"
        )
    for option in ("labels", "images", "column", "where", "columns"):
        if getattr(options, option) and option not in source.options:
            raise UserError(f"--{option} {getattr(options, option)}: {options.source} does not take this option")
    return source.find(options)


def images_of(recipe: str) -> int | None:
    """Return the number of training images of the data set in a recipe's name, `method_backbone_data_...`."""
    parts = Path(recipe).stem.split("_")
    sizes = {d.short: max(d.splits.values()) for d in DATASETS.values()}
    return next((sizes[part] for part in parts if part in sizes), None)
