"""Describes a view of an image: its random crop and its photometric operations, in the order they are applied."""

import re
from typing import Annotated, Any, Literal

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


def check_area(ends: tuple[float, float]) -> tuple[float, float]:
    if not 0 < ends[0] <= ends[1] < 1:
        raise ValueError("expected two shares of the area, above 0 and below 1, the lower first")
    return ends


def check_applied(names: tuple[str, ...] | None) -> tuple[str, ...] | None:
    if names is None:
        return None
    if wrong := [name for name in names if name not in APPLIED]:
        raise ValueError(f"unknown operation {wrong[0]!r}; known are {', '.join(APPLIED)}")
    if len(set(names)) < len(names):
        raise ValueError("expected each operation once")
    return names


# Operations on the training device, in their default order; a name is also the key of the operation's probability.
APPLIED = ("recrop", "jitter", "gray", "blur", "solarize", "sobel", "noise", "rotate", "cutout", "flip")
# Keys of operations that may move pixels after the crop, so that its box does not tell where in the image they were.
MOVING = ("recrop", "rotate", "randaugment", "operations")
CUTOUT, NOISE_STD = (1 / 16, 1 / 4), (0.02, 0.2)
Area = Annotated[tuple[float, float], AfterValidator(check_area)]
Applied = Annotated[tuple[str, ...] | None, AfterValidator(check_applied)]
Operation = Annotated[str, AfterValidator(check_operation)]
Range = Annotated[tuple[float, float], AfterValidator(check_range)]
Policy = Annotated[str, AfterValidator(check_policy)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class View:
    """The settings of one kind of view. A field of type Share is a probability, unless its comment says otherwise."""

    size: Annotated[int, Field(gt=0)] = 224  # side of the square view in pixels
    count: Annotated[int, Field(gt=0)] = 1  # number of views with these settings
    scale: Range = (0.08, 1.0)  # range of the random crop's area, as a share of the image's
    ratio: Range = (3 / 4, 4 / 3)  # range of the crop's width over its height
    interpolation: Literal["bilinear", "bicubic"] = "bicubic"  # how crops are resized
    flip: Share = 0.5  # probability of a horizontal flip
    randaugment: Policy | None = None  # timm's policy, such as rand-m9-mstd0.5-inc1; needs jitter: 0, as in timm
    jitter: Share = 0.8  # probability of colour jitter, whose four operations come in random order
    strength: tuple[float, float, float, float] = (0.4, 0.4, 0.2, 0.1)  # brightness, contrast, saturation, hue
    gray: Share = 0.2  # probability of grayscale
    blur: Share = 0.0  # probability of Gaussian blur
    sigma: Range = (0.1, 2.0)  # range of the blur's standard deviation in pixels
    solarize: Share = 0.0  # probability of solarisation, which inverts pixels of 128 and more, of 255
    erasing: Share = 0.0  # probability that noise fills a box of 2 to 33 % of the area, after normalisation
    recrop: Share = 0.0  # probability that the crop is cropped again, with the same ranges, and resized bilinearly
    sobel: Share = 0.0  # probability of Sobel's filter: the magnitude of the luminance's gradient, which shows edges
    noise: Share = 0.0  # probability of Gaussian noise, with one standard deviation per view
    noise_std: Range = NOISE_STD  # range of the noise's standard deviation, for pixels from 0 to 1
    rotate: Share = 0.0  # probability of a turn by 90, 180 or 270 degrees
    cutout: Share = 0.0  # probability that ImageNet's mean colour fills a square
    cutout_area: Area = CUTOUT  # range of the square's area, as a share of the view's
    # Only these, in this order, of recrop, jitter, gray, blur, solarize, sobel, noise, rotate, cutout, flip; None: all
    apply: Applied = None
    same_crop: bool = False  # use the crop of the previous view, which has the same ranges
    # Operations of plug-ins on the uint8 crop, in this order, before everything that runs on the device
    operations: tuple[Operation, ...] = ()

    def __post_init__(self) -> None:
        if self.scale[1] > 1:
            raise ValueError(f"scale={self.scale}: a crop cannot be larger than the whole image, 1")
        if self.randaugment and self.jitter:
            raise ValueError(f"randaugment={self.randaugment} needs jitter=0, got jitter={self.jitter}")
        if min(self.strength) < 0 or self.strength[3] > 0.5:
            raise ValueError(
                f"strength={self.strength}: expected four numbers from 0 on, the last of them (hue) at most 0.5"
            )
        for name in self.apply or ():
            if not getattr(self, name):
                raise ValueError(f"apply lists {name}, whose probability is 0; expected {name} above 0")

    @property
    def moving(self) -> dict[str, Any]:
        """The keys with which this view moves pixels after its crop, and their values."""
        return {key: value for key in MOVING if (value := getattr(self, key))}


def check_views(views: tuple[View, ...]) -> tuple[View, ...]:
    """Return the views. Raises ValueError when a view with `same_crop` does not follow a view with the same ranges."""
    for row, view in enumerate(views):
        before = views[row - 1] if row else None
        if view.same_crop and (before is None or (view.scale, view.ratio) != (before.scale, before.ratio)):
            raise ValueError(f"views.{row}.same_crop: expected a view before it with the same scale and ratio")
    return views
