"""Decodes image files with Pillow, which reads nearly every format and does not import PyTorch."""

import functools
import io
import re
import warnings

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

# What a sample may be. Pillow reads about forty formats, and starts Ghostscript for some, whatever a file is called.
FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "BMP", "GIF", "TIFF", "AVIF", "HEIF", "JPEG2000", "PPM")


class BadImage(ValueError):
    """The reason why an image cannot be used."""


@functools.cache
def _formats() -> tuple[str, ...]:
    """Return those of the formats that this build of Pillow has."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def open_image(data: bytes | memoryview) -> Image.Image:
    """Read the header of an image of one of the allowed formats. Raises whatever Pillow does."""
    return Image.open(io.BytesIO(data), formats=_formats())


def read_pixels(data: bytes | memoryview) -> NDArray[np.uint8]:
    """Decode an image into upright RGB pixels (H, W, 3). Raises BadImage."""
    try:
        return open_upright(data)
    except Exception as e:  # decoders raise whatever they like on broken input
        raise BadImage(reason(e)) from None


def open_upright(data: bytes | memoryview) -> NDArray[np.uint8]:
    """Decode an image into upright RGB pixels (H, W, 3). Raises whatever Pillow does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about large images and palettes with transparency
        with open_image(data) as image:
            image.load()  # the first frame of an animation
            upright = ImageOps.exif_transpose(image)
        if upright.mode.startswith("I") or upright.mode == "F":  # 16 bits and more, which PIL would clip to white
            deep = np.array(upright, np.float32)
            deep *= np.float32(1 / 257 if deep.max() > 255 else 1.0)  # in place: an image may have 179 million pixels
            upright = Image.fromarray(deep.clip(0, 255, out=deep).astype(np.uint8))
        return np.array(upright.convert("RGB"))


def reason(error: Exception) -> str:
    """The decoder's message on one line, without addresses in memory or in source files."""
    text = re.sub(r"decode_jpeg, \S+\.cpp:\d+, | <_io\.BytesIO object at \w+>", "", str(error))
    return " ".join(text.split())[:200] or type(error).__name__
