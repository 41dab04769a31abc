"""Describes a view of an image: its random crop and its photometric operations, in the order they are applied."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass

from eagleray.config import STRICT, register
from eagleray.config.types import Share


def check_range(ends: tuple[float, float]) -> tuple[float, float]:
    if not 0 < ends[0] <= ends[1]:
        raise ValueError("expected two positive numbers, the lower first")
    return ends


def check_policy(policy: str) -> str:
    if not re.fullmatch(r"rand(-((m|n|mmax|inc)\d+|(p|mstd)\d+(\.\d+)?))*", policy):
        raise ValueError("expected timm's name of a RandAugment policy, such as rand-m9-mstd0.5-inc1")
    return policy


def check_operation(name: str) -> str:
    names = sorted(register.entries("view"))
    if name not in names:
        known = ", ".join(names) or "none"
        raise ValueError(f"expected the name of a view operation that a plug-in registers; known are {known}")
    return name


Operation = Annotated[str, AfterValidator(check_operation)]
Range = Annotated[tuple[float, float], AfterValidator(check_range)]
Policy = Annotated[str, AfterValidator(check_policy)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class View:
    """The settings of one kind of view. A field of type Share is a probability, unless its comment says otherwise."""

    size: Annotated[int, Field(gt=0)] = 224  # pixels, square
    count: Annotated[int, Field(gt=0)] = 1
    scale: Range = (0.08, 1.0)  # share of the image area
    ratio: Range = (3 / 4, 4 / 3)  # width over height
    interpolation: Literal["bilinear", "bicubic"] = "bicubic"
    flip: Share = 0.5
    randaugment: Policy | None = None  # timm's policy, such as rand-m9-mstd0.5-inc1; needs jitter: 0, as in timm
    jitter: Share = 0.8
    strength: tuple[float, float, float, float] = (0.4, 0.4, 0.2, 0.1)  # brightness, contrast, saturation, hue
    gray: Share = 0.2
    blur: Share = 0.0
    sigma: Range = (0.1, 2.0)  # pixels
    solarize: Share = 0.0  # inverts pixels of 128 and more, of 255
    erasing: Share = 0.0  # fills a box with noise
    # Operations of plug-ins on the uint8 crop, in this order, before everything that runs on the device.
    operations: Annotated[tuple[Operation, ...], Field(exclude_if=lambda names: not names)] = ()

    def __post_init__(self) -> None:
        if self.scale[1] > 1:
            raise ValueError(f"scale={self.scale}: a crop cannot be larger than the whole image, 1")
        if self.randaugment and self.jitter:
            raise ValueError(f"randaugment={self.randaugment} needs jitter=0, got jitter={self.jitter}")
        if min(self.strength) < 0 or self.strength[3] > 0.5:
            raise ValueError(
                f"strength={self.strength}: expected four numbers from 0 on, the last of them (hue) at most 0.5"
            )
