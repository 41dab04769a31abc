"""Decodes images with any number of channels into uint8 levels, scaled by the mean and std of each channel."""

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import ImageOps

from eagleray.data.costs import BadImage
from eagleray.data.pixels import decoding, open_image
from eagleray.data.tiff import MAGIC, read_tiff
from eagleray.views.colours import colours

if TYPE_CHECKING:  # no import at run time: a model in MLflow has a copy of this file without the rest of eagleray
    from eagleray.config.channels import Channel

PNG = b"\x89PNG"
GREY, DEEP = 0, 16  # values in a PNG's header: colour type grey; bit depth that Pillow reduces to 8, except in grey
MODES = ("L", "LA", "RGB", "RGBA", "CMYK", "I", "F")  # Pillow's modes that keep a file's values


def decode_channels(data: bytes | memoryview, channels: "Sequence[Channel]") -> NDArray[np.uint8]:
    """Decode an image of N channels into levels (N, H, W). Raises BadImage, and the errors of decoders."""
    return levels(read_values(data, len(channels)), channels)


def levels(values: NDArray[Any], channels: "Sequence[Channel]") -> NDArray[np.uint8]:
    """Return values (H, W, N) as levels (N, H, W). Each channel is scaled and shifted so that its mean and standard
    deviation become those that backbones expect, then clipped to 0 to 255. Raises BadImage for infinities and NaN."""
    out = np.empty((len(channels), *values.shape[:2]), np.uint8)
    for level, value, channel, mean, std in zip(
        out, np.moveaxis(values, 2, 0), channels, *colours(len(channels)), strict=True
    ):
        x = value.astype(np.float32 if value.dtype.itemsize < 4 else np.float64)
        if value.dtype.kind == "f" and not np.isfinite(x).all():
            raise BadImage("values that are not finite numbers")
        x *= 255 * std / channel.std
        x += 255 * (mean - std * channel.mean / channel.std)
        level[:] = np.clip(np.rint(x, out=x), 0, 255, out=x)
    return out


def read_channels(data: bytes | memoryview, channels: int | None = None) -> NDArray[Any]:
    """Return the values (H, W, N) of an image as they are in its file. Raises BadImage, also if N is not `channels`."""
    with decoding():
        return read_values(data, channels)


def read_values(data: bytes | memoryview, channels: int | None = None) -> NDArray[Any]:
    """Return the values as `read_channels` does. Raises BadImage, and the errors of decoders."""
    values = _values(data, channels)
    if channels and values.shape[2] != channels:
        raise BadImage(f"{values.shape[2]} channel{'s' * (values.shape[2] > 1)}, expected {channels}")
    return values


def _values(data: bytes | memoryview, channels: int | None) -> NDArray[Any]:
    if bytes(data[:4]) in MAGIC:
        return read_tiff(data, channels)
    if bytes(data[:4]) == PNG and data[24] == DEEP and data[25] != GREY:
        raise BadImage("a PNG of 16 bits in several channels, of which Pillow reads eight; expected a TIFF")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns about large images
        with open_image(data) as image:
            image.load()
            upright = ImageOps.exif_transpose(image)
        if upright.mode.partition(";")[0] not in MODES:
            raise BadImage(f"colours of Pillow's mode {upright.mode}, expected channels")
        values = np.asarray(upright)
    return values[..., None] if values.ndim == 2 else values
