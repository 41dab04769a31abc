"""Lists of images in text files: a line for each, with its class."""

import re
from collections.abc import Iterable, Iterator, Mapping

from eagleray.base.errors import UserError
from eagleray.datasets.sources import files
from eagleray.datasets.sources.item import Item, named
from eagleray.storage.blob import Blob


def labelled(url: str, pattern: str, expected: str) -> Iterator[tuple[str, int]]:
    """Names and class numbers of the lines, found by the pattern's groups `name` and `label`; lines that begin with #
    are no images. Raises UserError for any other line."""
    for number, line in enumerate(files.text(url).splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = re.fullmatch(pattern, line.strip())
        if not match:
            raise UserError(f"{url}: line {number}: expected {expected}, found {line.strip()[:80]!r}")
        yield match["name"], int(match["label"])


def items(wanted: Iterable[tuple[str, int]], places: Mapping[str, Blob]) -> Iterator[Item]:
    """The images of a list, of which some may not be there."""
    for name, label in wanted:
        key, extension = named(name)
        blob = places.get(name)
        if blob is None:
            yield Item(key, "", 0, 0, reason="listed, but not among the files")
        else:
            yield Item(key, blob.url, 0, blob.size, extension, label)
