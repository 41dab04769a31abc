"""The sources that `eagleray prepare` knows, and what each of them takes."""

from collections.abc import Callable
from dataclasses import dataclass

from eagleray.base.errors import UserError
from eagleray.datasets.catalogue import DATASETS
from eagleray.datasets.sources.caltech_101 import caltech_101
from eagleray.datasets.sources.cars import cars
from eagleray.datasets.sources.cifar import cifar_10, cifar_100
from eagleray.datasets.sources.domainnet import domainnet
from eagleray.datasets.sources.fer2013 import fer2013
from eagleray.datasets.sources.flowers import flowers
from eagleray.datasets.sources.folder import coco, folder
from eagleray.datasets.sources.gtsrb import gtsrb
from eagleray.datasets.sources.hateful_memes import hateful_memes
from eagleray.datasets.sources.imagenet import imagenet_1k, imagenet_22k
from eagleray.datasets.sources.imagenet_100 import imagenet_100
from eagleray.datasets.sources.item import Found
from eagleray.datasets.sources.job import Job
from eagleray.datasets.sources.mnist import mnist
from eagleray.datasets.sources.openimages import openimages
from eagleray.datasets.sources.parquet import parquet
from eagleray.datasets.sources.path_lists import aircraft, dtd, food_101, sun397
from eagleray.datasets.sources.pets import pets
from eagleray.datasets.sources.stl10 import stl10
from eagleray.datasets.sources.svhn import svhn
from eagleray.datasets.sources.voc2007 import voc2007
from eagleray.datasets.sources.webdataset import webdataset
from eagleray.datasets.sources.webvision import webvision

OWN = "your own to know: the source does not say"
IMAGENET = "ImageNet terms of access: non-commercial research and education only"
RESEARCH = "published for research; no formal licence"
FAIR = "fair use, as its authors state; the images belong to their owners"


@dataclass(frozen=True)
class Source:
    find: Callable[[Job], Found]
    licence: str
    splits: tuple[str, ...] = ()
    options: tuple[str, ...] = ()  # that only some sources take, by their fields in Job


DOMAINS = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")


def _splits(name: str) -> tuple[str, ...]:
    return tuple(DATASETS[name].splits)


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
    "imagenet-100": Source(imagenet_100, IMAGENET, ("train", "val"), ("labels",)),
    "cifar-10": Source(cifar_10, RESEARCH, _splits("cifar-10")),
    "cifar-100": Source(cifar_100, RESEARCH, _splits("cifar-100")),
    "flowers-102": Source(flowers, RESEARCH, _splits("flowers-102")),
    "pets": Source(pets, "CC BY-SA 4.0; the images belong to their owners", _splits("pets")),
    "svhn": Source(svhn, "non-commercial use only", _splits("svhn")),
    "food-101": Source(food_101, RESEARCH, _splits("food-101")),
    "sun397": Source(sun397, RESEARCH, _splits("sun397")),
    "cars": Source(cars, "non-commercial research only", _splits("cars")),
    "aircraft": Source(aircraft, "non-commercial research only", _splits("aircraft")),
    "voc2007": Source(voc2007, "images under the terms of Flickr", _splits("voc2007")),
    "dtd": Source(dtd, RESEARCH, _splits("dtd")),
    "caltech-101": Source(caltech_101, "CC BY 4.0; the images belong to their owners", _splits("caltech-101")),
    "mnist": Source(mnist, RESEARCH, _splits("mnist")),
    "fer2013": Source(fer2013, RESEARCH, _splits("fer2013")),
    "stl10": Source(stl10, IMAGENET, _splits("stl10")),
    "gtsrb": Source(gtsrb, RESEARCH, _splits("gtsrb")),
    "hateful-memes": Source(hateful_memes, "the terms of its challenge: research only", _splits("hateful-memes")),
    **{name: Source(domainnet, FAIR, _splits(name)) for name in DOMAINS},
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
