"""What a view of an image is, as data: the crop and the photometric operations, in the order they are applied."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass

from eagleray.config import STRICT, register
from eagleray.config.types import Share


def check_range(ends: tuple[float, float]) -> tuple[float, float]:
    if not 0 < ends[0] <= ends[1]:
        raise ValueError("two positive numbers, the lower first, are expected")
    return ends


def check_policy(policy: str) -> str:
    if not re.fullmatch(r"rand(-((m|n|mmax|inc)\d+|(p|mstd)\d+(\.\d+)?))*", policy):
        raise ValueError("timm's name of a RandAugment policy is expected, such as rand-m9-mstd0.5-inc1")
    return policy


def check_operation(name: str) -> str:
    names = sorted(register.entries("view"))
    if name not in names:
        raise ValueError(
            f"a view operation that a plug-in registers is expected, known are {', '.join(names) or 'none'}"
        )
    return name


Operation = Annotated[str, AfterValidator(check_operation)]
Range = Annotated[tuple[float, float], AfterValidator(check_range)]
Policy = Annotated[str, AfterValidator(check_policy)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class View:
    """Random resized crop, RandAugment, jitter, grayscale, blur, solarise, flip, normalise, random erasing."""

    size: Annotated[int, Field(gt=0)] = 224  # pixels, square
    count: Annotated[int, Field(gt=0)] = 1
    scale: Range = (0.08, 1.0)  # share of the image area
    ratio: Range = (3 / 4, 4 / 3)  # width over height
    interpolation: Literal["bilinear", "bicubic"] = "bicubic"
    flip: Share = 0.5
    randaugment: Policy | None = None  # timm's, such as rand-m9-mstd0.5-inc1; jitter is to be 0 then, as in timm
    jitter: Share = 0.8
    strength: tuple[float, float, float, float] = (0.4, 0.4, 0.2, 0.1)  # brightness, contrast, saturation, hue
    gray: Share = 0.2
    blur: Share = 0.0
    sigma: Range = (0.1, 2.0)  # pixels
    solarize: Share = 0.0  # pixels of 128 and more of 255 are inverted
    erasing: Share = 0.0  # a box becomes noise
    # Operations of plug-ins on the uint8 crop, before all that happens on the device, in this order.
    operations: Annotated[tuple[Operation, ...], Field(exclude_if=lambda names: not names)] = ()

    def __post_init__(self) -> None:
        if self.scale[1] > 1:
            raise ValueError(f"scale={self.scale}: a crop is at most the whole image, 1")
        if self.randaugment and self.jitter:
            raise ValueError(f"randaugment={self.randaugment} goes with jitter=0, got jitter={self.jitter}")
        if min(self.strength) < 0 or self.strength[3] > 0.5:
            raise ValueError(
                f"strength={self.strength}: expected none below 0, and a hue of at most 0.5, half the circle"
            )
