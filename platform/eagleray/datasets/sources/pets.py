"""Oxford-IIIT Pets: images by breed, and lists of the splits."""

from functools import partial

from eagleray.datasets.sources import files, lists
from eagleray.datasets.sources.item import Found, Listing, is_image
from eagleray.datasets.sources.job import Job
from eagleray.storage.blob import Blob

LINE = r"(?P<name>\S+) (?P<label>\d+) \d+ \d+"


def pets(job: Job) -> Found:
    """The folder that has images/ and annotations/."""
    name = f"{job.split or 'trainval'}.txt"
    listed = [b for b in files.directly(f"{job.origin}/annotations/") if b.url.endswith(f"/{name}")]
    images = [b for b in files.below(f"{job.origin}/images") if is_image(b.url)] if listed else []
    if not images:
        raise files.nothing(job.origin, "images/Abyssinian_1.jpg in it" if listed else f"annotations/{name} in it")
    return Found([*listed, *images], partial(_listing, job, listed[0], images))


def _listing(job: Job, listed: Blob, images: list[Blob]) -> Listing:
    rows = list(lists.labelled(listed.url, LINE, "a name, its class from 1 on, species and breed"))
    breeds = {label: name.rpartition("_")[0] for name, label in rows}
    places = {files.relative(b, f"{job.origin}/images"): b for b in images}
    wanted = ((f"{name}.jpg", label - 1) for name, label in rows)
    return Listing(lists.items(wanted, places), [breeds.get(i, "") for i in range(1, max(breeds, default=0) + 1)])
