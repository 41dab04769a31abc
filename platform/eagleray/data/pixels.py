"""Decodes image files with Pillow, which reads nearly every format and does not import PyTorch."""

import functools
import io
import re
import warnings
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

# What a sample may be. Pillow reads about forty formats, and starts Ghostscript for some, whatever a file is called.
FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "BMP", "GIF", "TIFF", "AVIF", "HEIF", "JPEG2000", "PPM")


LARGEST_TILE = 2**24  # pixels; a tile is decoded whole, however small its image is
AT_ONCE = 2**22  # pixels that are converted at once
SAMPLES, TILE_WIDTH, TILE_HEIGHT = 277, 322, 323  # tags of TIFF


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
            _check_tiff(image)
            image.load()  # the first frame of an animation
            ImageOps.exif_transpose(image, in_place=True)
            return _rgb(image)


def _check_tiff(image: Image.Image) -> None:
    """Raise BadImage for a TIFF of which Pillow would show one of several planes, or whose tiles take much memory."""
    tags = getattr(image, "tag_v2", {})
    if tags.get(SAMPLES, 1) > 2 and len(image.getbands()) == 1:
        raise BadImage(NOT_READ)
    width, height = tags.get(TILE_WIDTH, 0), tags.get(TILE_HEIGHT, 0)
    if width * height > max(LARGEST_TILE, image.width * image.height):
        raise BadImage(f"a TIFF of {image.width} x {image.height} pixels in tiles of {width} x {height}")


def _rgb(image: Image.Image) -> NDArray[np.uint8]:
    """Return the RGB values (H, W, 3) of a decoded image, converted some rows at a time: a whole one would be in memory
    several times."""
    width, height = image.size
    rows = max(1, AT_ONCE // width)

    def parts() -> Iterator[Image.Image]:
        for top in range(0, height, rows):
            yield image if rows >= height else image.crop((0, top, width, min(top + rows, height)))

    out = np.empty((height, width, 3), np.uint8)
    deep = image.mode.startswith("I") or image.mode == "F"  # 16 bits and more, which Pillow would clip to white
    unit = _unit(parts(), fractions=image.mode == "F") if deep else np.float32(1)
    for top, part in zip(range(0, height, rows), parts(), strict=True):
        if deep:
            out[top : top + rows] = (np.array(part, np.float32) * unit).astype(np.uint8)[..., None]
        else:
            out[top : top + rows] = np.asarray(part.convert("RGB"))
    return out


def _unit(parts: Iterable[Image.Image], *, fractions: bool) -> np.float32:
    """Return what grey values of 16 bits, of 8, or with `fractions` from 0 to 1 are multiplied by, to have eight bits.
    Raises BadImage for values that are none of these."""
    extremes = np.array([(values.min(), values.max()) for values in map(np.asarray, parts)], np.float32)
    low, high = float(extremes[:, 0].min()), float(extremes[:, 1].max())
    if not (low >= 0 and high <= 65535):
        raise BadImage(f"values from {low:g} to {high:g}; expected 0 to 65535")
    return np.float32(255 if fractions and high <= 1 else 1 / 257 if high > 255 else 1)


def reason(error: Exception) -> str:
    """The decoder's message on one line, without addresses in memory or in source files."""
    text = re.sub(r"decode_jpeg, \S+\.cpp:\d+, | <_io\.BytesIO object at \w+>", "", str(error))
    return " ".join(text.split())[:200] or type(error).__name__
