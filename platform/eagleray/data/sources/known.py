"""The sources that `eagleray prepare` knows, and what each of them takes."""

from collections.abc import Callable
from dataclasses import dataclass

from eagleray.data.sources.folder import coco, folder
from eagleray.data.sources.imagenet import imagenet_1k, imagenet_22k
from eagleray.data.sources.item import Found
from eagleray.data.sources.job import Job
from eagleray.data.sources.openimages import openimages
from eagleray.data.sources.parquet import parquet
from eagleray.data.sources.webdataset import webdataset
from eagleray.data.sources.webvision import webvision
from eagleray.errors import UserError

OWN = "your own to know: the source does not say"
IMAGENET = "ImageNet terms of access: non-commercial research and education only"


@dataclass(frozen=True)
class Source:
    find: Callable[[Job], Found]
    licence: str
    splits: tuple[str, ...] = ()
    options: tuple[str, ...] = ()  # that only some sources take, by their fields in Job


SOURCES = {
    "imagenet-1k": Source(imagenet_1k, IMAGENET, ("train", "val", "test"), ("labels",)),
    "imagenet-22k": Source(imagenet_22k, IMAGENET),
    "openimages": Source(
        openimages,
        "images CC BY 2.0 as their authors state, kept as License in the metadata; annotations CC BY 4.0",
        ("train", "validation", "test"),
        ("images",),
    ),
    "webvision": Source(
        webvision,
        "WebVision terms: non-commercial research; the images belong to their owners",
        ("train", "val", "test"),
    ),
    "coco": Source(
        coco,
        "images under the licences of their Flickr authors, annotations CC BY 4.0",
        ("train2017", "val2017", "test2017", "unlabeled2017"),
    ),
    "folder": Source(folder, OWN),
    "webdataset": Source(webdataset, OWN),
    "parquet": Source(parquet, OWN, options=("column",)),
}


def find(job: Job) -> Found:
    """Look at a source. Raises UserError when it is unknown, does not take an option, or is not there."""
    source = SOURCES.get(job.source)
    if source is None:
        raise UserError(f"SOURCE {job.source}: unknown; known are {', '.join(SOURCES)}")
    if job.split and job.split not in source.splits:
        expected = f"expected {', '.join(source.splits)}" if source.splits else f"{job.source} has no splits"
        raise UserError(f"--split {job.split}: {expected}")
    for option in ("labels", "images", "column"):
        if getattr(job, option) and option not in source.options:
            raise UserError(f"--{option} {getattr(job, option)}: {job.source} does not take it")
    return source.find(job)
