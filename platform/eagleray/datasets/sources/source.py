"""Define what a source of images is: how its files are found and read, and the published facts about its data set."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from eagleray.datasets.sources.item import Item, Listing, items_of
from eagleray.datasets.sources.options import PrepareOptions
from eagleray.storage.blob import Blob
from eagleray.storage.ordered_map import ordered_map
from eagleray.storage.range_file import Span, read_span

Data = bytes | memoryview
Read = Callable[[Sequence[Item]], Iterator[tuple[Item, Data]]]

OWN = "not stated by the source: you have to know it"  # its licence


@dataclass(frozen=True)
class Dataset:
    """The published facts about a data set that recipes name."""

    title: str
    short: str  # its name in the names of recipes
    classes: int
    splits: Mapping[str, int]  # images of each split; the first split is the default of `eagleray prepare`
    obtain: str  # how a person gets it, as a sentence without its full stop
    contents: str  # what FROM has to contain, for the table in docs/finetune.md

    def __str__(self) -> str:
        first, second, *parts = (f"{count:,} in {name}" for name, count in self.splits.items())
        first = first.replace(" in ", " images in ")
        rest = f" ({' and '.join(parts)})" if parts else ""
        return f"{self.title} has {self.classes} classes, {first} and {second}{rest}. {self.obtain}."


def read_ranges(rows: Sequence[Item], encode: Callable[[Data], bytes] | None = None) -> Iterator[tuple[Item, Data]]:
    """Yield every item with the bytes of its image, which are a range of bytes in a file.

    If `encode` is given, the bytes are raw pixels, and `encode` makes an image file of them.
    """
    ranges = ordered_map(lambda i: read_span(Span(i.key, i.url, i.offset, i.size)), rows)
    return ((item, encode(data) if encode else data) for item, data in zip(rows, ranges, strict=True))


@dataclass(frozen=True)
class SourceFiles:
    """The files of a source, whose images are listed only when `listing` is called."""

    files: Sequence[Blob]  # every file that is read: equal files give equal items
    listing: Callable[[], Listing]  # may read the headers of all archives
    read: Read = read_ranges
    unread: str = ""  # how many files beside them are no images, by extension


@dataclass(frozen=True)
class Source:
    """One of the sources that `eagleray prepare` accepts as its argument SOURCE."""

    find: Callable[[PrepareOptions], SourceFiles]  # raises UserError when the files are not there
    licence: str
    dataset: Dataset | None = None
    splits: tuple[str, ...] = ()  # those of the data set when empty
    options: tuple[str, ...] = ()  # fields of PrepareOptions that only some sources take

    @property
    def split_names(self) -> tuple[str, ...]:
        return self.splits or tuple(self.dataset.splits if self.dataset else ())


def fetch(items: pa.Table, read: Read) -> Iterator[tuple[Item, Data]]:
    """Yield the items of a table, in order, with the bytes of their image files; the bytes of a missing image are
    empty.
    """
    return read(items_of(items))
