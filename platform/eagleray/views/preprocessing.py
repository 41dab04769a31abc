"""Settings of how an evaluation prepares images, which other libraries understand too."""

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
    """The resize of an image's short side, the centre crop and the normalisation of its colours."""

    size: PositiveInt  # pixels of the crop
    resize: PositiveInt  # pixels of the short side before the crop
    mean: tuple[float, ...] = MEAN  # one for each colour, for pixels in [0, 1]
    std: tuple[PositiveFloat, ...] = STD
    interpolation: Literal["bicubic"] = "bicubic"  # `centre_crop` uses it
    channels: Channels = ()  # the channels of a decoded image; empty: red, green and blue

    @classmethod
    def of(cls, size: int, resize: int, channels: Channels = ()) -> "Preprocessing":
        """Return the settings for images of these channels."""
        mean, std = colours(planes(channels))
        return cls(size=size, resize=resize, mean=mean, std=std, channels=channels)

    def __call__(self, image: Tensor) -> Tensor:
        """Return what the backbone is given, float (N, S, S), of a decoded image, uint8 (N, H, W)."""
        crop = centre_crop(image, resize=self.resize, size=self.size)
        return normalise(crop.unsqueeze(0), torch.device("cpu"))[0]

    def timm(self) -> dict[str, Any]:
        """Return the same as keys of timm's `pretrained_cfg`."""
        share = self.size / self.resize
        if int(self.size / share) != self.resize:  # timm divides, and rounds down
            share = self.size / (self.resize + 0.5)
        crop = {"crop_pct": share, "crop_mode": "center", "interpolation": self.interpolation}
        return {
            "input_size": [len(self.mean), self.size, self.size],
            **crop,
            "mean": list(self.mean),
            "std": list(self.std),
        }

    def plain(self) -> dict[str, Any]:
        """Return the settings as values that JSON holds."""
        plain = asdict(self)
        return plain if self.channels else {k: v for k, v in plain.items() if k != "channels"}
