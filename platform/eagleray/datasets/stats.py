"""What a set of images is like: counts, formats, sizes and shapes, and what was left out and why. Censuses add up."""

import io
import math
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from PIL import Image

EXAMPLES = 20  # of dropped images, per reason
REASONS = 50  # that are told apart
OTHER = "other reasons"
# Both in equal steps of the logarithm; outside of the edges lies one more bin on either side. A photograph of 4:3, 3:2
# or 16:9 lies well inside a bin.
SIDES = [round(16 * 2 ** (i / 4)) for i in range(37)]  # pixels of the shorter side
ASPECTS = [round(2 ** ((2 * i + 1) / 10), 4) for i in range(-11, 11)]  # width / height
Data = bytes | memoryview


@dataclass
class Dropped:
    count: int = 0
    examples: list[str] = field(default_factory=list)


@dataclass
class Census:
    images: int = 0
    bytes: int = 0
    formats: Counter[str] = field(default_factory=Counter)
    sides: list[int] = field(default_factory=lambda: [0] * (len(SIDES) + 1))
    aspects: list[int] = field(default_factory=lambda: [0] * (len(ASPECTS) + 1))
    dropped: dict[str, Dropped] = field(default_factory=dict)

    def count(self, data: Data, height: int, width: int) -> None:
        """One more image, upright."""
        self.images += 1
        self.bytes += len(data)
        self.formats[format_of(data)] += 1
        self.sides[int(np.searchsorted(SIDES, min(height, width), "right"))] += 1
        self.aspects[int(np.searchsorted(ASPECTS, width / height, "right"))] += 1

    def drop(self, reason: str, example: str, count: int = 1) -> None:
        """One more image that is left out."""
        if reason not in self.dropped and len(self.dropped) >= REASONS:
            example, reason = f"{example}: {reason}", OTHER
        entry = self.dropped.setdefault(reason, Dropped())
        entry.count += count
        if len(entry.examples) < EXAMPLES:
            entry.examples.append(example)

    def add(self, other: "Census") -> None:
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

    def plain(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self) | {"formats": dict(sorted(self.formats.items()))}

    @classmethod
    def of(cls, plain: dict[str, Any]) -> "Census":
        dropped = {reason: Dropped(**entry) for reason, entry in plain["dropped"].items()}
        return cls(**plain | {"formats": Counter(plain["formats"]), "dropped": dropped})


def format_of(data: Data) -> str:
    """As PIL names it, whatever the file is called."""
    with Image.open(io.BytesIO(data)) as image:
        return str(image.format)


def fitted(height: int, width: int, longest: int) -> tuple[int, int]:
    """Height and width, shrunk so that the longer one is `longest`."""
    scale = longest / max(height, width)
    return max(math.floor(height * scale + 0.5), 1), max(math.floor(width * scale + 0.5), 1)
