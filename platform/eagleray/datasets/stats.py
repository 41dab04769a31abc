"""Compute statistics of a set of images: number, formats, sizes, aspect ratios, and how many were left out and why."""

import math
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from eagleray.data.costs import JPEG
from eagleray.data.file_names import readable
from eagleray.data.pixels import open_image
from eagleray.data.tiff import MAGIC

EXAMPLES = 20  # most dropped images that are named per reason
REASONS = 50  # most reasons that are listed; images with any further reason are counted under OTHER
OTHER = "other reasons"
# Edges of bins in equal steps of the logarithm, with an open bin beyond either end. With these edges of ASPECTS, 4:3,
# 3:2 and 16:9 lie well inside a bin.
SIDES = [round(16 * 2 ** (i / 4)) for i in range(37)]  # pixels of the shorter side
ASPECTS = [round(2 ** ((2 * i + 1) / 10), 4) for i in range(-11, 11)]  # width / height
Data = bytes | memoryview


@dataclass
class DropCount:
    """The number of images that were left out for one reason, and the keys of some of them."""

    count: int = 0
    examples: list[str] = field(default_factory=list)


@dataclass
class ImageStats:
    """Counts of images by format, size and shape. The statistics of two sets can be added."""

    images: int = 0
    bytes: int = 0
    formats: Counter[str] = field(default_factory=Counter)
    sides: list[int] = field(default_factory=lambda: [0] * (len(SIDES) + 1))
    aspects: list[int] = field(default_factory=lambda: [0] * (len(ASPECTS) + 1))
    dropped: dict[str, DropCount] = field(default_factory=dict)

    def count(self, data: Data, height: int, width: int) -> None:
        """Count one image file. `height` and `width` are those of the upright image in pixels."""
        self.images += 1
        self.bytes += len(data)
        self.formats[image_format(data)] += 1
        self.sides[int(np.searchsorted(SIDES, min(height, width), "right"))] += 1
        self.aspects[int(np.searchsorted(ASPECTS, width / height, "right"))] += 1

    def drop(self, reason: str, example: str, count: int = 1) -> None:
        """Count `count` images that are left out for a reason. `example` is the key of one of them."""
        if reason not in self.dropped and len(self.dropped) >= REASONS:
            example, reason = f"{example}: {reason}", OTHER
        entry = self.dropped.setdefault(reason, DropCount())
        entry.count += count
        if len(entry.examples) < EXAMPLES:
            entry.examples.append(readable(example))

    def add(self, other: "ImageStats") -> None:
        """Add the counts of another set of images to these counts."""
        self.images += other.images
        self.bytes += other.bytes
        self.formats.update(other.formats)
        self.sides = [a + b for a, b in zip(self.sides, other.sides, strict=True)]
        self.aspects = [a + b for a, b in zip(self.aspects, other.aspects, strict=True)]
        for reason, entry in other.dropped.items():
            self.drop(reason, entry.examples[0], entry.count)
            mine = self.dropped.get(reason)
            if mine:
                mine.examples += entry.examples[1 : 1 + EXAMPLES - len(mine.examples)]

    def to_json(self) -> dict[str, Any]:
        """Return the statistics as values that JSON can hold."""
        return asdict(self) | {"formats": dict(sorted(self.formats.items()))}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "ImageStats":
        """Return the statistics from the result of `to_json`."""
        dropped = {reason: DropCount(**entry) for reason, entry in values["dropped"].items()}
        return cls(**values | {"formats": Counter(values["formats"]), "dropped": dropped})


def image_format(data: Data) -> str:
    """Return the format of an image by its name in PIL, detected from the bytes of the file."""
    start = bytes(data[:4])  # PIL opens neither every TIFF, which may have any number of channels, nor every JPEG
    if kind := "TIFF" if start in MAGIC else "JPEG" if start.startswith(JPEG) else "":
        return kind
    with open_image(data) as image:
        return str(image.format)


def fit_within(height: int, width: int, longest: int) -> tuple[int, int]:
    """Scale a height and width in pixels so that the longer side becomes `longest`, and neither is below 1."""
    scale = longest / max(height, width)
    return max(math.floor(height * scale + 0.5), 1), max(math.floor(width * scale + 0.5), 1)
