"""Look at some images of a data set before a recipe is written: their number, classes, sizes, channels and formats."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from eagleray.base.console import say
from eagleray.base.errors import UserError
from eagleray.base.progress import counting
from eagleray.data.channels import read_channels
from eagleray.data.image_folder import class_labels, holds_images, list_images
from eagleray.data.image_list import image_list
from eagleray.data.index import open_shown
from eagleray.data.pixels import open_image
from eagleray.storage import store

SAMPLE = 256  # images that are looked at
BUDGET = 2**28  # bytes of them, after which no more are read
KEPT = 16  # files that are returned
GREY = {"1": 1, "L": 1, "LA": 1, "I": 1, "F": 1, "I;16": 1}  # channels by the modes of Pillow that are not colours


@dataclass(frozen=True)
class Survey:
    """Facts about a data set. All but the numbers of images and classes describe the images that were looked at."""

    images: int
    classes: int  # 0: no labels
    looked: int  # images that could be opened
    broken: int  # images that could not
    sides: tuple[int, int, int]  # pixels of the shorter side: 5th percentile, median, 95th percentile
    width: int  # median
    height: int  # median
    channels: int  # the number that most images have, without transparency: 3 for colours
    formats: Counter[str]
    image_bytes: float  # mean
    files: tuple[bytes, ...]  # some images

    def lines(self) -> Iterator[str]:
        """Yield what was seen, for a person."""
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
    """Look at a data set: shards, which are indexed first if they have no index, or a folder of images, whose names are
    listed. The same images are looked at in every call. Raises UserError, also when none can be opened, and Outage."""
    url = store.absolute(data)
    if holds_images(url):
        say(f"listing the images in {data}")
        with image_list(url, say) as images:
            list_images(url, images, say)
            # The order of the list is that of a hash of the names, so its beginning is a sample.
            names = [image.path for image in next(images.parts())[:SAMPLE]]
            count, classes = images.count, len(class_labels(images.top_folders()))
        return _look(count, classes, range(len(names)), lambda i: store.store(url).get(f"{url}/{names[i]}"), data)
    index = open_shown(url, note=say)
    classes = len(np.unique(index.label[index.label >= 0]))
    order = np.random.default_rng(0).permutation(len(index))[:SAMPLE].tolist()
    return _look(len(index), classes, order, lambda i: bytes(index.read(i, i + 1)), data)


def _facts(file: bytes) -> tuple[tuple[int, int], int, str]:
    """Return width and height, channels and format of an image, of its header alone where it is no TIFF: those have
    channels in pages and planes, which Pillow does not count. Raises whatever decoders do."""
    if file[:4] in (b"II*\0", b"MM\0*"):
        height, width, planes = read_channels(file).shape
        return (width, height), planes, "TIFF"
    with open_image(file) as image:
        return image.size, GREY.get(image.mode, 3), image.format or "unknown"


def _look(images: int, classes: int, order: Sequence[int], read: Callable[[int], bytes], data: str) -> Survey:
    """Return what is seen of some of so many images; `read` returns the file of a number in `order`."""
    shapes, formats, channels = list[tuple[int, int]](), Counter[str](), Counter[int]()
    files, total, looked = list[bytes](), 0, 0
    with counting("looking", "images") as tick:
        for number in order:
            file, looked = read(number), looked + 1
            tick(looked, len(order))
            total += len(file)
            try:
                size, planes, form = _facts(file)
            except Exception:  # decoders raise whatever they like on broken input
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
