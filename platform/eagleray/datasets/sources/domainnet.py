"""DomainNet: one folder of class folders for each of its six domains, and lists of their splits."""

from functools import partial
from pathlib import PurePosixPath

from eagleray.datasets.sources import files, lists
from eagleray.datasets.sources.item import Found, Listing, is_image
from eagleray.datasets.sources.job import Job
from eagleray.storage.blob import Blob

LINE = r"(?P<name>\S.*) (?P<label>\d+)"


def domainnet(job: Job) -> Found:
    """The folder that has a domain's own, such as clipart/, and clipart_train.txt and clipart_test.txt."""
    name = f"{job.source}_{job.split or 'train'}.txt"
    listed = [b for b in files.directly(job.origin + "/") if b.url.endswith(f"/{name}")]
    images = [b for b in files.below(f"{job.origin}/{job.source}") if is_image(b.url)] if listed else []
    if not images:
        raise files.nothing(job.origin, f"{job.source}/ with images in it" if listed else f"{name} in it")
    return Found([*listed, *images], partial(_listing, job, listed[0], images))


def _listing(job: Job, listed: Blob, images: list[Blob]) -> Listing:
    rows = list(lists.labelled(listed.url, LINE, "a path and a class number"))
    names = {label: PurePosixPath(name).parent.name for name, label in rows}
    places = {files.relative(b, job.origin): b for b in images}
    classes = [names.get(label, "") for label in range(max(names, default=-1) + 1)]  # a list may lack a class
    return Listing(lists.items(rows, places), classes)
