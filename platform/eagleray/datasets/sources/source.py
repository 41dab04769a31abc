"""Define the options of `eagleray prepare`, how the files of a source are found and read, and facts of its data set."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import pyarrow as pa

from eagleray.base.numbers_given import whole
from eagleray.datasets.sources.item import Item, Listing, items_of
from eagleray.storage import store
from eagleray.storage.blob import Blob
from eagleray.storage.ordered_map import ordered_map
from eagleray.storage.range_file import Span, read_span

Data = bytes | memoryview
Read = Callable[[Sequence[Item]], Iterator[tuple[Item, Data]]]

OWN = "not stated by the source: you have to know it"  # licence of a source that is the user's own


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """The settings of `eagleray prepare`: its source, its destination and how to write the shards.

    The defaults are those of the command line."""

    source: str
    origin: str
    destination: str
    split: str = ""
    labels: str = ""  # file or folder with the labels of ImageNet's validation images
    images: str = ""  # folder with the image files of Open Images
    column: str = ""  # name of the column of images in a Parquet file
    where: str = ""  # SQL expression that is true for the samples to take from indexed shards
    columns: str = ""  # Parquet or CSV file with more columns for `where`
    size: int = 128  # MiB of source files per shard
    max_side: int = 0  # largest longer side in pixels; 0: no limit
    min_side: int = 0  # least shorter side in pixels
    channels: int = 0  # number of channels of the images; 0: red, green and blue
    dedup: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise UserError for settings that are not whole numbers or are too small."""
        for name, least in {"size": 1, "max_side": 0, "min_side": 0, "channels": 0, "seed": 0}.items():
            object.__setattr__(self, name, whole(name, getattr(self, name), least))

    def resolved(self) -> "PrepareOptions":
        """Return a copy whose paths and URLs are absolute and do not end in a slash."""
        names = ("origin", "destination", "labels", "images", "columns")
        urls: dict[str, Any] = {name: getattr(self, name) for name in names}
        urls = {name: url and store.absolute(url).rstrip("/") for name, url in urls.items()}
        return replace(self, **urls)

    def identity(self) -> dict[str, Any]:
        """Return the options that the bytes of the shards depend on, by their names on the command line."""
        names = {"origin": "FROM", "source": "SOURCE"}
        kept = {k: v for k, v in asdict(self).items() if k != "destination"}
        return {names.get(k) or "--" + k.replace("_", "-"): v for k, v in kept.items()}


@dataclass(frozen=True)
class Dataset:
    """The published facts about a data set that recipes name."""

    title: str
    short: str  # name in the file names of recipes
    classes: int
    splits: Mapping[str, int]  # number of images of each split; the first split is the default of `eagleray prepare`
    # How a person gets the data, as a sentence without its full stop
    obtain: str = "It comes as shards, which are used as they are"
    contents: str = ""  # files that the argument FROM must hold, for the table in docs/finetune.md

    def __str__(self) -> str:
        first, second, *parts = (f"{count:,} in {name}" for name, count in self.splits.items())
        first = first.replace(" in ", " images in ")
        rest = f" ({' and '.join(parts)})" if parts else ""
        return f"{self.title} has {self.classes} classes, {first} and {second}{rest}. {self.obtain}."


def read_ranges(rows: Sequence[Item], encode: Callable[[Data], bytes] | None = None) -> Iterator[tuple[Item, Data]]:
    """Yield every item with the bytes of its image, which are a byte range of a file.

    If `encode` is given, these bytes are no image file, such as raw pixels, and `encode` turns them into one."""
    ranges = ordered_map(lambda i: read_span(Span(i.key, i.url, i.offset, i.size)), rows)
    return ((item, encode(data) if encode else data) for item, data in zip(rows, ranges, strict=True))


@dataclass(frozen=True)
class SourceFiles:
    """The files of a source. Their images are listed only when `listing` is called."""

    files: Sequence[Blob]  # every file that is read; equal files give equal items
    listing: Callable[[], Listing]  # lists the images, for which it may read the headers of all archives
    read: Read = read_ranges
    unread: str = ""  # text with the number of files that are not images, by extension; empty if there are none


@dataclass(frozen=True)
class Source:
    """A source that `eagleray prepare` accepts as its argument SOURCE."""

    find: Callable[[PrepareOptions], SourceFiles]  # raises UserError when files are missing
    licence: str
    dataset: Dataset | None = None
    splits: tuple[str, ...] = ()  # names of the splits; empty: the splits of `dataset`
    options: tuple[str, ...] = ()  # fields of PrepareOptions that only some sources take, and this source does

    @property
    def split_names(self) -> tuple[str, ...]:
        return self.splits or tuple(self.dataset.splits if self.dataset else ())


def fetch(items: pa.Table, read: Read) -> Iterator[tuple[Item, Data]]:
    """Yield the items of a table, in order, with the bytes of their image files; empty bytes for a missing image."""
    return read(items_of(items))
