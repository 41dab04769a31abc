"""The bytes of items, whatever holds them; pixels that are no image file become one."""

from collections.abc import Iterator

import pyarrow as pa

from eagleray.datasets.sources import cifar, fer2013, mnist, parquet, stl10, svhn
from eagleray.datasets.sources.item import Item
from eagleray.storage.ordered_map import ahead
from eagleray.storage.range_file import Span, content

# What makes a file of pixels that are none, by their items' extension.
PICTURES = {
    cifar.PLANES: cifar.picture,
    fer2013.WORDS: fer2013.picture,
    mnist.GREY: mnist.picture,
    stl10.COLUMNS: stl10.picture,
}


def fetch(items: pa.Table, column: str) -> Iterator[tuple[Item, bytes | memoryview]]:
    """Items with their bytes, in the order of the table; where the source has none, they are empty."""
    rows = [Item(**row) for row in items.to_pylist()]
    if column:
        return _cells(rows, column)
    if rows and rows[0].extension == svhn.ARRAY:
        return svhn.images(rows)
    found = zip(rows, ahead(lambda i: content(Span(i.key, i.url, i.offset, i.size)), rows), strict=True)
    return ((item, PICTURES[item.extension](data) if item.extension in PICTURES else data) for item, data in found)


def _cells(rows: list[Item], column: str) -> Iterator[tuple[Item, bytes]]:
    """Every row group is read once, and only what is wanted of it is kept."""
    wanted: dict[tuple[str, int], list[int]] = {}
    for position, item in enumerate(rows):
        wanted.setdefault((item.url, item.group), []).append(position)
    held = [b""] * len(rows)
    for (url, group), positions in wanted.items():
        cells = parquet.read(url, group, column)
        for position in positions:
            held[position] = cells[rows[position].offset] or b""
    return zip(rows, held, strict=True)
