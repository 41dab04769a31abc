"""Examine some images of a data set before writing a recipe: their number, classes, sizes, channels and formats."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from eagleray.base.console import say
from eagleray.base.errors import UserError
from eagleray.base.progress import counting
from eagleray.data.channels import read_channels
from eagleray.data.costs import BadImage
from eagleray.data.image_folder import class_labels, holds_images, list_images
from eagleray.data.image_list import image_list
from eagleray.data.index import open_shown
from eagleray.data.pixels import open_image
from eagleray.storage import store

SAMPLE = 256  # most images that are examined
BUDGET = 2**28  # bytes of image files after which no further file is read
KEPT = 16  # most image files whose content a Survey keeps
GREY = {"1": 1, "L": 1, "LA": 1, "I": 1, "F": 1, "I;16": 1}  # number of channels of Pillow's modes without colour


@dataclass(frozen=True)
class Survey:
    """Facts about a data set. All but the numbers of images and classes describe the examined images."""

    images: int
    classes: int  # number of classes; 0: no labels
    looked: int  # number of images that could be opened
    broken: int  # number of images that could not be opened
    sides: tuple[int, int, int]  # pixels of the shorter side: 5th percentile, median, 95th percentile
    width: int  # median, pixels
    height: int  # median, pixels
    channels: int  # most frequent number of channels, without transparency; 3: colour
    formats: Counter[str]
    image_bytes: float  # mean size of a file, bytes
    files: tuple[bytes, ...]  # content of some image files

    def lines(self) -> Iterator[str]:
        """Yield lines that describe the data set to a person."""
        classes = f"{self.classes:,} classes" if self.classes else "no classes"
        common = [(name, count / self.looked) for name, count in self.formats.most_common(3)]
        kinds = ", ".join(f"{name} {share:.0%}" for name, share in common if share >= 0.01)
        yield f"{self.images:,} images, {classes}; {self.looked} of them were looked at:"
        low, middle, high = self.sides
        yield f"shorter side {low} to {high} pixels (5th to 95th percentile), median {middle}; {kinds}"
        colours = {1: "grey", 3: "colour"}.get(self.channels, f"{self.channels} channels")
        broken = f"; {self.broken} cannot be opened" if self.broken else ""
        size = f"{self.width} x {self.height} pixels"
        yield f"{colours}, {size} and {self.image_bytes / 1024:,.1f} KiB in the middle{broken}"


def survey(data: str) -> Survey:
    """Examine shards, which are indexed if they have no index, or a folder of images. Every call examines the same
    images. Raises UserError if no image can be read, and Outage if the store does not answer."""
    url = store.absolute(data)
    if holds_images(url):
        say(f"listing the images in {data}")
        with image_list(url, say) as images:
            list_images(url, images, say)
            # The list is ordered by a hash of the names, so its beginning is a random sample.
            names = [image.path for image in next(images.parts())[:SAMPLE]]
            count, classes = images.count, len(class_labels(images.top_folders()))
        return _look(count, classes, range(len(names)), lambda i: store.store(url).get(f"{url}/{names[i]}"), data)
    index = open_shown(url, note=say)
    classes = len(np.unique(index.label[index.label >= 0]))
    order = np.random.default_rng(0).permutation(len(index))[:SAMPLE].tolist()
    return _look(len(index), classes, order, lambda i: bytes(index.read(i, i + 1)), data)


def _facts(file: bytes) -> tuple[tuple[int, int], int, str]:
    """Return the (width, height), number of channels and format of an image, from its header alone unless it is a TIFF:
    Pillow does not count channels in pages and planes of TIFFs. Raises any exception of a decoder."""
    if file[:4] in (b"II*\0", b"MM\0*"):
        with contextlib.suppress(BadImage):  # one with a palette, bits or JPEG inside, which only Pillow reads
            height, width, planes = read_channels(file).shape
            return (width, height), planes, "TIFF"
    with open_image(file) as image:
        return image.size, GREY.get(image.mode, 3), image.format or "unknown"


def _look(images: int, classes: int, order: Sequence[int], read: Callable[[int], bytes], data: str) -> Survey:
    """Return the Survey of a data set from its images with the indices `order`. `read` returns the file of an index."""
    shapes, formats, channels = list[tuple[int, int]](), Counter[str](), Counter[int]()
    files, total, looked = list[bytes](), 0, 0
    with counting("looking", "images") as tick:
        for number in order:
            file, looked = read(number), looked + 1
            tick(looked, len(order))
            total += len(file)
            try:
                size, planes, form = _facts(file)
            except Exception:  # decoders raise any error on broken input
                continue
            shapes.append(size)
            channels[planes] += 1
            formats[form] += 1
            if len(files) < KEPT:
                files.append(file)
            if total > BUDGET:
                break
    if not shapes:
        raise UserError(f"{data}: none of {looked} images can be opened")
    widths, heights = np.array(shapes).T
    low, middle, high = np.quantile(np.minimum(widths, heights), [0.05, 0.5, 0.95]).round().astype(int).tolist()
    return Survey(
        images=images,
        classes=classes,
        looked=len(shapes),
        broken=looked - len(shapes),
        sides=(low, middle, high),
        width=int(np.median(widths)),
        height=int(np.median(heights)),
        channels=channels.most_common(1)[0][0],
        formats=formats,
        image_bytes=total / looked,
        files=tuple(files),
    )
