"""Read a source as `eagleray prepare` does, and compare what was read with what the test laid out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.layouts import run_prepare

from eagleray.base.errors import UserError
from eagleray.data.decode import decode
from eagleray.data.index import open_index
from eagleray.datasets.catalogue import DATASETS, find
from eagleray.datasets.sources.item import Item, Listing, table
from eagleray.datasets.sources.source import PrepareOptions, SourceFiles, fetch

Images = dict[str, tuple[Any, int]]  # by key: bytes or pixels (H, W, 3), and the label
Layout = Callable[[Path, str], Images]  # lays a folder out as a data set is downloaded; returns the images of a split


def find_source(source: str, origin: Path, **options: Any) -> SourceFiles:
    return find(PrepareOptions(source=source, origin=str(origin), destination="/nowhere", **options))


def read_source(source: str, origin: Path, **options: Any) -> tuple[Listing, dict[str, tuple[bytes, Item]]]:
    """The listing of a source, and by key the bytes and the item of every usable image."""
    source_files = find_source(source, origin, **options)
    listing = source_files.listing()
    items = list(listing.items)
    assert len({i.key for i in items}) == len(items)
    fetched = fetch(table(i for i in items if i.reason is None), source_files.read)
    return listing, {item.key: (bytes(data), item) for item, data in fetched}


def drop_reasons(source: str, origin: Path, **options: Any) -> dict[str, str]:
    """The reason, by key, of every item that is dropped."""
    return {i.key: i.reason for i in find_source(source, origin, **options).listing().items if i.reason}


def source_error(source: str, origin: Path, **options: Any) -> str:
    """The one line with which a source is refused."""
    with pytest.raises(UserError) as e:
        read_source(source, origin, **options)
    assert "\n" not in str(e.value)
    return str(e.value)


def same_image(data: bytes, expected: Any) -> bool:
    if isinstance(expected, bytes):
        return data == expected
    return bool((decode(data).permute(1, 2, 0).numpy() == expected).all())


def check_split(layout: Layout, name: str, split: str, folder: Path) -> None:
    """A split has exactly the images and labels that were laid out."""
    expected = layout(folder / "in", split)
    images = read_source(name, folder / "in", split=split)[1]
    assert images.keys() == expected.keys()
    for key, (data, item) in images.items():
        assert same_image(data, expected[key][0]), key
        assert item.label == expected[key][1], key
    if split == next(iter(DATASETS[name].splits)):
        assert read_source(name, folder / "in")[1].keys() == expected.keys(), "the first split is the default"


def check_shards(layout: Layout, name: str, form: str, folder: Path) -> None:
    """The shards of the test split hold all its images, in the format `form`, and its labels."""
    expected = layout(folder / "in", "test")
    card = run_prepare(name, folder / "in", folder / "out", split="test")
    assert card["images"] == card["listed"] == len(expected)
    assert not card["dropped"]
    assert set(card["formats"]) == {form}
    index = open_index(str(folder / "out"), folder)
    assert sorted(index.label.tolist()) == sorted(label for _, label in expected.values())
