"""Decodes image files with Pillow, which reads nearly every format and does not import PyTorch."""

import functools
import io
import re
import warnings

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

# What a sample may be. Pillow reads about forty formats, and starts Ghostscript for some, whatever a file is called.
FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "BMP", "GIF", "TIFF", "AVIF", "HEIF", "JPEG2000", "PPM")


class BadImage(ValueError):
    """The reason why an image cannot be used."""


HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")  # ISO/IEC 23008-12
HEIC_EXTENSIONS = frozenset({"heic", "heics", "heif", "heifs", "hif"})
NO_HEIC = "HEIC, which needs the package pillow-heif"
NOT_READ = "a TIFF that Pillow does not read, such as one of five channels or more, for which there is data.channels"


@functools.cache
def _formats() -> tuple[str, ...]:
    """Return those of the formats that are there: this build of Pillow may lack some, and pillow-heif is optional."""
    Image.init()
    try:
        import pillow_heif
    except ImportError:
        pass
    else:
        pillow_heif.register_heif_opener(thumbnails=False, decode_threads=1)  # loaders have a process for each core
    return tuple(name for name in FORMATS if name in Image.OPEN)


@functools.cache
def image_extensions() -> frozenset[str]:
    """Return the file extensions, without the dot, of all image formats that are read."""
    _formats()
    return frozenset(e[1:] for e, kind in Image.registered_extensions().items() if kind in Image.OPEN)


def open_image(data: bytes | memoryview) -> Image.Image:
    """Read the header of an image of one of the allowed formats. Raises BadImage and whatever Pillow does."""
    try:
        return Image.open(io.BytesIO(data), formats=_formats())
    except UnidentifiedImageError:
        if data[4:8] == b"ftyp" and data[8:12] in HEIC_BRANDS and "HEIF" not in _formats():
            raise BadImage(NO_HEIC) from None
        if bytes(data[:4]) in (b"II*\0", b"MM\0*"):
            raise BadImage(NOT_READ) from None
        raise


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
            if getattr(image, "tag_v2", {}).get(277, 1) > 2 and len(image.getbands()) == 1:  # one of several planes
                raise BadImage(NOT_READ)
            image.load()  # the first frame of an animation
            upright = ImageOps.exif_transpose(image)
        if upright.mode.startswith("I") or upright.mode == "F":  # 16 bits and more, which PIL would clip to white
            return np.repeat(_shallow(np.array(upright, np.float32), fractions=upright.mode == "F")[..., None], 3, 2)
        return np.array(upright.convert("RGB"))


def _shallow(deep: NDArray[np.float32], *, fractions: bool) -> NDArray[np.uint8]:
    """Return grey values (H, W) in eight bits, in place of those of 16, of 8, or with `fractions` from 0 to 1. Raises
    BadImage for values that are none of these."""
    low, high = float(deep.min()), float(deep.max())
    if not (low >= 0 and high <= 65535):
        raise BadImage(f"values from {low:g} to {high:g}; expected 0 to 65535")
    unit = fractions and high <= 1
    deep *= np.float32(255 if unit else 1 / 257 if high > 255 else 1)  # in place: it may have 179 million pixels
    return deep.astype(np.uint8)


def reason(error: Exception) -> str:
    """The decoder's message on one line, without addresses in memory or in source files."""
    text = re.sub(r"decode_jpeg, \S+\.cpp:\d+, | <_io\.BytesIO object at \w+>", "", str(error))
    return " ".join(text.split())[:200] or type(error).__name__
