"""Hateful Memes: images, and JSON lines that say which are hateful. The text beside them is not used."""

import json
from collections.abc import Iterator
from functools import partial

from eagleray.base.errors import UserError
from eagleray.datasets.sources import files, lists
from eagleray.datasets.sources.item import Found, Listing, is_image
from eagleray.datasets.sources.job import Job
from eagleray.storage.blob import Blob

LISTS = {"train": ("train.jsonl",), "dev": ("dev.jsonl", "dev_seen.jsonl")}  # as the challenge's two phases called it


def hateful_memes(job: Job) -> Found:
    """The folder that has img/ and the lists. The test images have no public labels, so papers test on dev."""
    names = LISTS[job.split or "train"]
    listed = [b for b in files.directly(job.origin + "/") if b.url.rpartition("/")[2] in names]
    images = [b for b in files.below(f"{job.origin}/img") if is_image(b.url)] if listed else []
    if not images:
        raise files.nothing(job.origin, "img/ with images in it" if listed else f"{' or '.join(names)} in it")
    places = {files.relative(b, job.origin): b for b in images}
    listing = partial(_listing, listed[0], places)
    return Found([listed[0], *images], listing)


def _listing(listed: Blob, places: dict[str, Blob]) -> Listing:
    return Listing(lists.items(list(_wanted(listed)), places), ("not hateful", "hateful"))


def _wanted(listed: Blob) -> Iterator[tuple[str, int]]:
    for number, line in enumerate(files.text(listed.url).splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            yield str(row["img"]), {0: 0, 1: 1}[row["label"]]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{listed.url}: line {number}: expected JSON with img and label, 0 or 1") from None
