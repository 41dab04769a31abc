"""The settings by which an evaluation prepares images, also in the form that timm uses."""

from dataclasses import asdict
from typing import Any, Literal

import torch
from pydantic import PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from eagleray.config import STRICT
from eagleray.config.channels import Channels, planes
from eagleray.views.colours import MEAN, STD, colours
from eagleray.views.crop import centre_crop
from eagleray.views.photometric import normalise


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Preprocessing:
    """The settings of preprocessing: the resize of an image's shorter side, the centre crop and the normalisation."""

    size: PositiveInt  # side of the square crop in pixels
    resize: PositiveInt  # shorter side of the resized image, before the crop, in pixels
    mean: tuple[float, ...] = MEAN  # mean of each channel, for pixels in [0, 1]
    std: tuple[PositiveFloat, ...] = STD
    interpolation: Literal["bicubic"] = "bicubic"  # the only one that `centre_crop` supports
    channels: Channels = ()  # channels of decoded images; empty: red, green and blue

    @classmethod
    def of(cls, size: int, resize: int, channels: Channels = ()) -> "Preprocessing":
        """Return the settings for images with these channels, with the mean and std that `colours` has for them."""
        mean, std = colours(planes(channels))
        return cls(size=size, resize=resize, mean=mean, std=std, channels=channels)

    def __call__(self, image: Tensor) -> Tensor:
        """Return the backbone's input, float (N, S, S), for a decoded image, uint8 (N, H, W)."""
        crop = centre_crop(image, resize=self.resize, size=self.size)
        return normalise(crop.unsqueeze(0), torch.device("cpu"))[0]

    def timm(self) -> dict[str, Any]:
        """Return the settings as keys of timm's `pretrained_cfg`."""
        share = self.size / self.resize
        if int(self.size / share) != self.resize:  # timm computes the shorter side as int(size / share)
            share = self.size / (self.resize + 0.5)
        crop = {"crop_pct": share, "crop_mode": "center", "interpolation": self.interpolation}
        return {
            "input_size": [len(self.mean), self.size, self.size],
            **crop,
            "mean": list(self.mean),
            "std": list(self.std),
        }

    def plain(self) -> dict[str, Any]:
        """Return the settings as values that JSON can hold."""
        plain = asdict(self)
        return plain if self.channels else {k: v for k, v in plain.items() if k != "channels"}
