"""Hateful Memes: images, and JSON lines that say which are hateful; the text in those lines is not used."""

import json
from collections.abc import Iterator
from functools import partial

from eagleray.base.errors import UserError
from eagleray.datasets.sources import files, lists
from eagleray.datasets.sources.item import Listing, is_image
from eagleray.datasets.sources.options import PrepareOptions
from eagleray.datasets.sources.source import Dataset, Source, SourceFiles
from eagleray.storage.blob import Blob

LISTS = {
    "train": ("train.jsonl",),
    "dev": ("dev.jsonl", "dev_seen.jsonl"),
}  # the challenge's two phases


def hateful_memes(options: PrepareOptions) -> SourceFiles:
    """Find img/ and the lists of the splits.

    The labels of the test images are not public, so papers report results on the split dev.
    """
    names = LISTS[options.split or "train"]
    tables = [b for b in files.list_folder(options.origin + "/") if b.url.rpartition("/")[2] in names]
    images = [b for b in files.list_tree(f"{options.origin}/img") if is_image(b.url)] if tables else []
    if not images:
        missing = "img/ with images in it" if tables else f"{' or '.join(names)} in it"
        raise files.missing_error(options.origin, missing)
    blobs = {files.relative_path(b, options.origin): b for b in images}
    return SourceFiles([tables[0], *images], partial(_listing, tables[0], blobs))


def _listing(table: Blob, blobs: dict[str, Blob]) -> Listing:
    return Listing(lists.match_items(list(_rows(table)), blobs), ("not hateful", "hateful"))


def _rows(table: Blob) -> Iterator[tuple[str, int]]:
    for number, line in enumerate(files.read_text(table.url).splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            yield str(row["img"]).encode(errors="replace").decode(), {0: 0, 1: 1}[row["label"]]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UserError(
                f"{table.url}: line {number}: expected a JSON object with the keys img and label, which is 0 or 1"
            ) from None


SOURCES = {
    "hateful-memes": Source(
        hateful_memes,
        licence="the terms of its challenge: research only",
        dataset=Dataset(
            "Hateful Memes",
            short="hateful",
            classes=2,
            splits={"train": 8_500, "dev": 500},
            obtain="Download it from hatefulmemeschallenge.com",
            contents="`img/`, `train.jsonl`, `dev.jsonl` or `dev_seen.jsonl`",
        ),
    )
}
