"""Find a source of `eagleray prepare` or a data set by its name, in `sets` or in a plug-in."""

from dataclasses import replace
from pathlib import Path

from eagleray.base.errors import UserError
from eagleray.config import register
from eagleray.datasets.sets import OTHERS, SHIPPED
from eagleray.datasets.sources.source import OWN, PrepareOptions, Source, SourceFiles

SOURCES = register.Registry(
    "source", SHIPPED, lambda entry: Source(entry.target, **{"licence": OWN, "splits": ("all",)} | entry.details)
)
DATASETS = {name: source.dataset for name, source in SOURCES.items() if source.dataset} | OTHERS


def find(options: PrepareOptions) -> SourceFiles:
    """Find the files of the source that the options name. Without a split, the source's first split is used.

    Raises UserError when the source is unknown, when its files are missing, or when an option does not apply to it."""
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
    return source.find(replace(options, split=options.split or next(iter(source.split_names), "")))


def images_of(recipe: str) -> int | None:
    """Return the number of training images, those of the first split, of the data set that a recipe's name contains, as
    in mocov3_vits16_in1k_ep300. None: the name contains none of DATASETS."""
    parts = Path(recipe).stem.split("_")
    sizes = {d.short: next(iter(d.splits.values())) for d in DATASETS.values()}
    return next((sizes[part] for part in parts if part in sizes), None)
