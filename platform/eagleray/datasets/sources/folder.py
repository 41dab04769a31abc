"""Plain folders of images: any, and COCO's, which are used without labels."""

from collections.abc import Iterator, Sequence
from functools import partial

from eagleray.datasets.sources import files
from eagleray.datasets.sources.item import Found, Item, Listing, is_image, named, numbered
from eagleray.datasets.sources.job import Job
from eagleray.storage.blob import Blob


def folder(job: Job) -> Found:
    """Every image below a folder. Folders directly below it are the classes, if there are two and every image is in
    one."""
    blobs = [b for b in files.below(job.origin) if is_image(b.url)]
    if not blobs:
        raise files.nothing(job.origin, "a folder with images in it or below it")
    return Found(blobs, partial(_classes, job.origin, blobs))


def coco(job: Job) -> Found:
    """A folder of one split below the folder of the set, as its zip files unpack."""
    place = f"{job.origin}/{job.split or 'train2017'}"
    blobs = [b for b in files.below(place) if is_image(b.url)]
    if not blobs:
        raise files.nothing(job.origin, f"a folder {place.rpartition('/')[2]}/ with images")
    return Found(blobs, lambda: Listing(_items(place, blobs)))


def _classes(origin: str, blobs: Sequence[Blob]) -> Listing:
    tops = {files.relative(b, origin).rpartition("/")[0].partition("/")[0] for b in blobs}
    numbers = numbered(tops) if "" not in tops and len(tops) > 1 else {}
    return Listing(_items(origin, blobs, numbers), list(numbers))


def _items(origin: str, blobs: Sequence[Blob], numbers: dict[str, int] | None = None) -> Iterator[Item]:
    for blob in blobs:
        name = files.relative(blob, origin)
        key, extension = named(name)
        yield Item(key, blob.url, 0, blob.size, extension, (numbers or {}).get(name.partition("/")[0], -1))
