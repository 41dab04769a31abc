"""Open Images: lists of image ids, and the public bucket or a mirror that has the files."""

import io
from collections.abc import Iterator
from functools import partial
from pathlib import PurePosixPath

import pyarrow as pa
from pyarrow import csv

from eagleray.base.errors import UserError
from eagleray.datasets.sources import files
from eagleray.datasets.sources.item import Found, Item, Listing, is_image, named, packed
from eagleray.datasets.sources.job import Job
from eagleray.storage.blob import Blob
from eagleray.storage.range_file import READ, Ranges, Span

BUCKET = "s3://open-images-dataset"


def openimages(job: Job) -> Found:
    """A list that has the column ImageID; its other columns become metadata."""
    if not job.origin.lower().endswith(".csv"):
        raise UserError(f"{job.origin}: expected a CSV of image ids, such as image_ids_and_rotation.csv")
    split = job.split or "train"
    place = job.images or f"{BUCKET}/{split}"
    listed = files.one(job.origin)
    images = [b for b in files.below(place) if is_image(b.url)]
    if not images:
        raise UserError(f"--images {place}: no image files there")
    return Found([listed, *images], partial(_listing, listed, images, split))


def _listing(listed: Blob, images: list[Blob], split: str) -> Listing:
    return Listing(_items(listed, {PurePosixPath(b.url).stem: b for b in images}, split))


def _items(listed: Blob, images: dict[str, Blob], split: str) -> Iterator[Item]:
    seen: set[str] = set()  # a list of boxes names an image once for each
    for row in _rows(listed):
        name = row.pop("ImageID")
        if name in seen or row.get("Subset", split) != split:
            continue
        seen.add(name)
        blob = images.get(name)
        if blob is None:
            yield Item(name, "", 0, 0, reason="listed, but not among the images")
        else:
            key, extension = named(PurePosixPath(blob.url).name)
            yield Item(key, blob.url, 0, blob.size, extension, meta=packed(row))
    if not seen:
        raise UserError(f"{listed.url}: lists no image of --split {split}")


def _rows(listed: Blob) -> Iterator[dict[str, str]]:
    source = io.BufferedReader(Ranges(Span("", listed.url, 0, listed.size)), READ)
    try:
        names = source.readline().decode("utf-8-sig").strip().split(",")
        if "ImageID" not in names:
            raise UserError(f"{listed.url}: expected a column ImageID, found {', '.join(names)[:200]}")
        reader = csv.open_csv(
            source,
            read_options=csv.ReadOptions(column_names=names),
            parse_options=csv.ParseOptions(newlines_in_values=True),  # titles have them
            convert_options=csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string())),
        )
        for batch in reader:
            yield from batch.to_pylist()
    except (pa.ArrowException, UnicodeDecodeError) as e:
        raise UserError(f"{listed.url}: is no CSV of image ids: {' '.join(str(e).split())}") from None
