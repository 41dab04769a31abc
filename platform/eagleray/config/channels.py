"""Describes the channels of images that are not photographs in red, green and blue, such as a satellite's bands."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass

from eagleray.base.errors import UserError
from eagleray.config import STRICT
from eagleray.config.view import View

RGB = 3
MOST = 64  # largest number of channels of an image


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Channel:
    """One channel: the mean and the standard deviation of its values over the data, in the units of the files."""

    mean: Annotated[float, Field(allow_inf_nan=False)]
    std: Annotated[float, Field(gt=0, allow_inf_nan=False)]


def check_number(channels: tuple[Channel, ...]) -> tuple[Channel, ...]:
    if len(channels) > MOST:
        raise ValueError(f"{len(channels)} channels; expected {MOST} at most")
    return channels


Channels = Annotated[tuple[Channel, ...], AfterValidator(check_number)]  # empty: red, green and blue


def planes(channels: Sequence[Channel]) -> int:
    """Return the number of channels of a decoded image: three if `channels` is empty."""
    return len(channels) or RGB


def check_operations(views: Sequence[View], channels: Sequence[Channel]) -> None:
    """Raise UserError, which names the keys to set, when views ask for operations that need red, green and blue."""
    if len(channels) in (0, RGB):
        return
    for i, view in enumerate(views):
        if view.randaugment:
            raise UserError(f"views.{i}.randaugment={view.randaugment}: needs {RGB} channels, got {len(channels)}")
    keys = []
    for i, view in enumerate(views):
        if view.gray:
            keys.append(f"views.{i}.gray=0")
        if view.jitter and any(view.strength[2:]):
            keys.append(f"views.{i}.strength=[{view.strength[0]:g},{view.strength[1]:g},0,0]")
    if keys:
        raise UserError(
            f"data.channels: grey, saturation and hue need {RGB}, got {len(channels)}; expected {' '.join(keys)}"
        )
