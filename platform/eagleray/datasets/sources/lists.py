"""Find the images of a data set with lists that have an image and its class on each line, and read such lists."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Literal

from eagleray.base.errors import UserError
from eagleray.datasets.sources import files
from eagleray.datasets.sources.item import Item, Listing, is_image, key_and_extension
from eagleray.datasets.sources.source import SourceFiles
from eagleray.storage.blob import Blob

DIGITS = 18  # most digits of a class number; Python refuses to parse a number of thousands of digits
Rows = Iterable[tuple[str, int]]  # name of each image in a list, and its label
ReadLists = Callable[[Sequence[Blob]], tuple[Rows, Sequence[str]]]  # returns the rows of some lists, and class names


def find_listed(
    origin: str,
    tables: Sequence[str],
    folder: str,
    read: ReadLists,
    *,
    expected: str = "",
    anywhere: bool = False,
    by: Literal["path", "whole path", "name"] = "path",
    wanted: Callable[[str], bool] = is_image,
) -> SourceFiles:
    """Find the lists of a data set, and the images in a folder. The paths of both are relative to `origin`.

    With `anywhere`, the lists may be in any folder. The lists name an image `by` its path in the folder, by its whole
    path below `origin` or by its file name. Raises UserError when a list is missing, or when there is no image;
    `expected` then describes what is missing."""
    if anywhere:
        names = files.by_name(files.list_tree(origin))
        there = {table: names[name] for table in tables if (name := PurePosixPath(table).name) in names}
    else:
        parents = dict.fromkeys(f"{origin}/{table}".rpartition("/")[0] for table in tables)
        there = files.by_path((blob for parent in parents for blob in files.list_folder(parent + "/")), origin)
    found = files.pick(origin, there, tables)
    images = [blob for blob in files.list_tree(f"{origin}/{folder}") if wanted(blob.url)]
    if not images:
        raise files.missing_error(origin, expected or f"{folder}/ with images in it")

    def listing() -> Listing:
        rows, classes = read(found)
        root = origin if by == "whole path" else f"{origin}/{folder}"
        return Listing(
            match_items(rows, files.by_name(images) if by == "name" else files.by_path(images, root)), classes
        )

    return SourceFiles([*found, *images], listing)


def lines(url: str) -> Iterator[tuple[int, str]]:
    """Yield the number, from 1 on, and the stripped text of every line that is not blank."""
    for number, line in enumerate(files.read_text(url).splitlines(), 1):
        if line.strip():
            yield number, line.strip()


def read_labels(url: str, pattern: str, expected: str, labels: range) -> Iterator[tuple[str, int]]:
    """Yield the file name and the class number in every line of a text file.

    The pattern matches a whole line and has the groups `name` and `label`. Empty lines and lines that begin with # are
    skipped. Raises UserError for any other line that does not match or whose class is not in `labels`. `expected`
    describes the right form of a line."""
    for number, line in lines(url):
        if line.startswith("#"):
            continue
        match = re.fullmatch(pattern, line)
        if not match or len(match["label"]) > DIGITS or int(match["label"]) not in labels:
            raise UserError(f"{url}: line {number}: expected {expected}, found {line[:80]!r}")
        yield match["name"], int(match["label"])


def names_of(classes: Mapping[int, str]) -> list[str]:
    """Return the names of classes in the order of their labels. A label without a name gets an empty name."""
    return [classes.get(label, "") for label in range(max(classes, default=-1) + 1)]


def match_items(rows: Rows, blobs: Mapping[str, Blob], call: Callable[[str], str] = str) -> Iterator[Item]:
    """Yield an item for every name and label in a list. `call` turns the name into the key of its file in `blobs`.

    If the file is missing, the item gets a reason to be dropped."""
    for name, label in rows:
        key, extension = key_and_extension(name)
        blob = blobs.get(call(name))
        if blob is None:
            yield Item(key, "", 0, 0, reason="listed, but not among the files")
        else:
            yield Item(key, blob.url, 0, blob.size, extension, label)
