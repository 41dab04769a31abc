"""Read Open Images: a list of image ids, and the image files in its public bucket or a copy of it."""

import io
from collections.abc import Iterator
from pathlib import PurePosixPath

import pyarrow as pa
from pyarrow import csv

from eagleray.base.errors import UserError, explained
from eagleray.datasets.sources import files
from eagleray.datasets.sources.item import Item, Listing, is_image, key_and_extension, metadata_json
from eagleray.datasets.sources.source import PrepareOptions, SourceFiles
from eagleray.storage.blob import Blob
from eagleray.storage.range_file import READ, RangeFile, Span

BUCKET = "s3://open-images-dataset"


def openimages(options: PrepareOptions) -> SourceFiles:
    """Find the images whose ids a CSV file has in a column ImageID. The file's other columns become metadata."""
    if not options.origin.lower().endswith(".csv"):
        raise UserError(f"{options.origin}: expected a CSV of image ids, such as image_ids_and_rotation.csv")
    folder = options.images or f"{BUCKET}/{options.split}"
    table = files.find_file(options.origin)
    images = [b for b in files.list_tree(folder) if is_image(b.url)]
    if not images:
        raise UserError(f"--images {folder}: contains no image files")
    by_id = {PurePosixPath(b.url).stem: b for b in images}
    return SourceFiles([table, *images], lambda: Listing(_items(table, by_id, options.split)))


def _items(table: Blob, images: dict[str, Blob], split: str) -> Iterator[Item]:
    seen: set[str] = set()  # a CSV file of boxes names an image once for each of its boxes
    for row in _rows(table):
        name = row.pop("ImageID")
        if name in seen or row.get("Subset", split) != split:
            continue
        seen.add(name)
        blob = images.get(name)
        if blob is None:
            yield Item(name, "", 0, 0, reason="listed, but not among the images")
        else:
            key, extension = key_and_extension(PurePosixPath(blob.url).name)
            yield Item(key, blob.url, 0, blob.size, extension, meta=metadata_json(row))
    if not seen:
        raise UserError(f"{table.url}: lists no image of --split {split}")


def _rows(table: Blob) -> Iterator[dict[str, str]]:
    file = io.BufferedReader(RangeFile(Span("", table.url, 0, table.size)), READ)
    with explained(f"{table.url}: not a CSV of image ids", pa.ArrowException, UnicodeDecodeError):
        names = file.readline().decode("utf-8-sig").strip().split(",")
        if "ImageID" not in names:
            raise UserError(f"{table.url}: expected a column ImageID, found {', '.join(names)[:200]}")
        reader = csv.open_csv(
            file,
            read_options=csv.ReadOptions(column_names=names),
            parse_options=csv.ParseOptions(newlines_in_values=True),  # titles contain newlines
            convert_options=csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string())),
        )
        for batch in reader:
            yield from batch.to_pylist()
