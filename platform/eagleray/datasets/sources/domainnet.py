"""DomainNet: for each of its six domains a folder of class folders, and lists of its splits."""

from functools import partial
from pathlib import PurePosixPath

from eagleray.datasets.sources import files, lists
from eagleray.datasets.sources.item import Listing, is_image
from eagleray.datasets.sources.options import PrepareOptions
from eagleray.datasets.sources.source import Dataset, Source, SourceFiles
from eagleray.storage.blob import Blob

LINE = r"(?P<name>\S.*) (?P<label>\d+)"
CLASSES = 345


def domainnet(options: PrepareOptions) -> SourceFiles:
    """Find a domain's folder, such as clipart/, and beside it the lists clipart_train.txt and clipart_test.txt."""
    name = f"{options.source}_{options.split or 'train'}.txt"
    tables = [b for b in files.list_folder(options.origin + "/") if b.url.endswith(f"/{name}")]
    images = [b for b in files.list_tree(f"{options.origin}/{options.source}") if is_image(b.url)] if tables else []
    if not images:
        raise files.missing_error(options.origin, f"{options.source}/ with images in it" if tables else f"{name} in it")
    return SourceFiles([*tables, *images], partial(_listing, options, tables[0], images))


def _listing(options: PrepareOptions, table: Blob, images: list[Blob]) -> Listing:
    rows = list(lists.read_labels(table.url, LINE, f"a path and a class number below {CLASSES}", range(CLASSES)))
    names = {label: PurePosixPath(name).parent.name for name, label in rows}
    blobs = {files.relative_path(b, options.origin): b for b in images}
    classes = [names.get(label, "") for label in range(max(names, default=-1) + 1)]  # a list may lack a class
    return Listing(lists.match_items(rows, blobs), classes)


def _source(title: str, train: int, test: int) -> Source:
    """Describe one domain."""
    name = title.lower()
    return Source(
        domainnet,
        licence="fair use, as its authors state; the images belong to their owners",
        dataset=Dataset(
            f"DomainNet {title}",
            short=name,
            classes=CLASSES,
            splits={"train": train, "test": test},
            obtain=f"Download {name}.zip, {name}_train.txt and {name}_test.txt from ai.bu.edu/M3SDA",
            contents=f"`{name}/`, `{name}_train.txt`, `{name}_test.txt`",
        ),
    )


SOURCES = {
    "clipart": _source("Clipart", 33_525, 14_604),
    "infograph": _source("Infograph", 36_023, 15_582),
    "painting": _source("Painting", 50_416, 21_850),
    "quickdraw": _source("Quickdraw", 120_750, 51_750),
    "real": _source("Real", 120_906, 52_041),
    "sketch": _source("Sketch", 48_212, 20_916),
}
