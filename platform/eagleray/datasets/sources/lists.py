"""Read text files that list images with their classes, one image on each line."""

import re
from collections.abc import Iterable, Iterator, Mapping

from eagleray.base.errors import UserError
from eagleray.datasets.sources import files
from eagleray.datasets.sources.item import Item, key_and_extension
from eagleray.storage.blob import Blob

DIGITS = 18  # of a class number, at most; Python refuses to read thousands


def read_labels(url: str, pattern: str, expected: str, labels: range) -> Iterator[tuple[str, int]]:
    """Yield the file name and the class number in every line of a text file.

    The pattern matches a whole line and has the groups `name` and `label`. Empty lines and lines that begin with # are
    skipped. Raises UserError for any other line that does not match or whose class is none of `labels`; `expected`
    describes the right form of a line.
    """
    for number, line in enumerate(files.read_text(url).splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = re.fullmatch(pattern, line.strip())
        if not match or len(match["label"]) > DIGITS or int(match["label"]) not in labels:
            raise UserError(f"{url}: line {number}: expected {expected}, found {line.strip()[:80]!r}")
        yield match["name"], int(match["label"])


def match_items(rows: Iterable[tuple[str, int]], blobs: Mapping[str, Blob]) -> Iterator[Item]:
    """Yield an item for every file name and label in a list; `blobs` are the files by name.

    If the file is missing, the item carries a reason for which it is dropped.
    """
    for name, label in rows:
        key, extension = key_and_extension(name)
        blob = blobs.get(name)
        if blob is None:
            yield Item(key, "", 0, 0, reason="listed, but not among the files")
        else:
            yield Item(key, blob.url, 0, blob.size, extension, label)
