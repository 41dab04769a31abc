"""Decodes image files with Pillow, which reads nearly every format and does not import PyTorch."""

import contextlib
import functools
import io
import re
import warnings
import zlib
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from eagleray.data.costs import JPEG, BadImage, check_image, check_jpeg, check_webp

# The image formats that are read. Pillow recognises some forty by their content, and runs Ghostscript for some of them.
FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "BMP", "GIF", "TIFF", "AVIF", "HEIF", "JPEG2000", "PPM")


PNG, TEXTS = b"\x89PNG\r\n\x1a\n", (b"tEXt", b"zTXt", b"iTXt", b"iCCP")
# The beginnings of PNG texts that may hold the EXIF orientation, and the most bytes of such a text.
ORIENTED, LONGEST = (b"Raw profile type exif\0", b"XML:com.adobe.xmp\0"), 2**19
LARGEST_TILE = 2**24  # most pixels of a tile, which is decoded whole, however small its image is
AT_ONCE = 2**22  # most pixels that are converted at a time
SAMPLES, TILE_WIDTH, TILE_HEIGHT = 277, 322, 323  # tags of TIFF

HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")  # ISO/IEC 23008-12
HEIC_EXTENSIONS = frozenset({"heic", "heics", "heif", "heifs", "hif"})
NO_HEIC = "HEIC, which needs the package pillow-heif"
NOT_READ = "a TIFF that Pillow does not read, such as one of five channels or more, for which there is data.channels"


@functools.cache
def _formats() -> tuple[str, ...]:
    """Return those of FORMATS that can be read: this build of Pillow may lack some, and pillow-heif is optional."""
    Image.init()
    with contextlib.suppress(ImportError):
        import pillow_heif

        pillow_heif.register_heif_opener(thumbnails=False, decode_threads=1)  # loaders have a process for each core
    return tuple(name for name in FORMATS if name in Image.OPEN)


@functools.cache
def image_extensions() -> frozenset[str]:
    """Return the file extensions, without the dot, of all image formats that are read."""
    known = _formats()
    return frozenset(e[1:] for e, kind in Image.registered_extensions().items() if kind in known)


def begins_like_image(start: bytes) -> bool:
    """Return whether the first 16 bytes of a file may be those of an image."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return any((accept := Image.OPEN[kind][1]) is None or accept(start) is True for kind in _formats())


def open_image(data: bytes | memoryview) -> Image.Image:
    """Open an image of an allowed format and read its header. Raises BadImage, also if decoding would take too much
    memory or time, and Pillow's errors."""
    if data[:2] == JPEG:
        check_jpeg(data)
    check_webp(data)
    try:
        image = open_allowed(data)
        check_image(image, len(data))
        return image
    except UnidentifiedImageError:
        if data[4:8] == b"ftyp" and data[8:12] in HEIC_BRANDS and "HEIF" not in _formats():
            raise BadImage(NO_HEIC) from None
        if bytes(data[:4]) in (b"II*\0", b"MM\0*"):
            raise BadImage(NOT_READ) from None
        raise


def open_allowed(data: bytes | memoryview) -> Image.Image:
    """Open an image of an allowed format, whatever it takes to decode it. Raises Pillow's errors."""
    return Image.open(io.BytesIO(without_texts(data) if data[:8] == PNG else data), formats=_formats())


def without_texts(png: bytes | memoryview) -> bytes | memoryview:
    """Return a PNG without texts and colour profiles, as Pillow refuses long ones. Short texts that may hold the EXIF
    orientation are kept."""
    parts, at, kept = [], len(PNG), 0
    while at + 12 <= len(png):
        kind, end = bytes(png[at + 4 : at + 8]), at + 12 + int.from_bytes(png[at : at + 4])
        if kind in TEXTS and not (end - at < LONGEST and _oriented(bytes(png[at + 8 : end - 4]))):
            parts.append(png[kept:at])
            kept = end
        at = end
    return b"".join([*parts, png[kept:]]) if parts else png


def _oriented(text: bytes) -> bool:
    """Return whether a text of a PNG may hold the orientation, and is short once it is decompressed."""
    name = next((name for name in ORIENTED if text.startswith(name)), None)
    if name != ORIENTED[0] or text[len(name) :][:1] != b"\0":  # not compressed; writers must not compress XMP
        return name is not None
    unpack = zlib.decompressobj()
    try:
        return len(unpack.decompress(text[len(name) + 1 :], LONGEST)) < LONGEST
    except zlib.error:
        return False


def read_pixels(data: bytes | memoryview) -> NDArray[np.uint8]:
    """Decode an image into upright RGB pixels (H, W, 3). Raises BadImage."""
    with decoding():
        return open_upright(data)


@contextlib.contextmanager
def decoding() -> Iterator[None]:
    """A context in which every error is raised as BadImage, as decoders raise any error on broken input."""
    try:
        yield
    except BadImage:
        raise
    except Exception as e:
        raise BadImage(reason(e)) from None


def open_upright(data: bytes | memoryview) -> NDArray[np.uint8]:
    """Decode an image into upright RGB pixels (H, W, 3). Raises BadImage and Pillow's errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns about large images and transparent palettes
        with open_image(data) as image:
            _check_tiff(image)
            image.load()  # loads the first frame of an animation
            ImageOps.exif_transpose(image, in_place=True)
            return _rgb(image)


def _check_tiff(image: Image.Image) -> None:
    """Raise BadImage for a TIFF of several planes, of which Pillow would show one, and for tiles of too many pixels."""
    tags = getattr(image, "tag_v2", {})
    if tags.get(SAMPLES, 1) > 2 and len(image.getbands()) == 1:
        raise BadImage(NOT_READ)
    width, height = tags.get(TILE_WIDTH, 0), tags.get(TILE_HEIGHT, 0)
    if width * height > max(LARGEST_TILE, image.width * image.height):
        raise BadImage(f"a TIFF of {image.width} x {image.height} pixels in tiles of {width} x {height}")


def _rgb(image: Image.Image) -> NDArray[np.uint8]:
    """Return the RGB values (H, W, 3) of a decoded image. Transparent parts become white. If this leaves a single
    colour, they become black, and if that does, too, opaque. Raises BadImage for an image that shows nothing."""
    if _is_deep(image) or not image.has_transparency_data:
        return _before(image, None)
    for ground in (255, 0, None):
        out = _before(image, ground)
        if (out.min((0, 1)) < out.max((0, 1))).any():
            return out
    if min(part.convert("RGBA").getchannel("A").getextrema()[0] for part in _parts(image)) != 255:
        raise BadImage("nothing is seen in it: it is transparent and of one colour")
    return out


def _is_deep(image: Image.Image) -> bool:
    """Return whether values have 16 bits or more, so that Pillow would clip them to white."""
    return image.mode.startswith("I") or image.mode == "F"


def _parts(image: Image.Image) -> Iterator[Image.Image]:
    """Yield an image some rows at a time, as converting all of it at once would hold it in memory several times."""
    width, height = image.size
    rows = max(1, AT_ONCE // width)
    for top in range(0, height, rows):
        yield image if rows >= height else image.crop((0, top, width, min(top + rows, height)))


def _before(image: Image.Image, ground: int | None) -> NDArray[np.uint8]:
    """Return an image's RGB values (H, W, 3) on a background of the grey `ground`. None: transparency is ignored."""
    out, top = np.empty((image.height, image.width, 3), np.uint8), 0
    deep = _is_deep(image)
    unit = _unit(_parts(image), fractions=image.mode == "F") if deep else np.float32(1)
    for part in _parts(image):
        rows = out[top : top + part.height]
        if deep:
            rows[:] = (np.array(part, np.float32) * unit).astype(np.uint8)[..., None]
        elif ground is None:
            rows[:] = np.asarray(part.convert("RGB"))
        else:
            behind = Image.new("RGBA", part.size, (ground, ground, ground, 255))
            rows[:] = np.asarray(Image.alpha_composite(behind, part.convert("RGBA")))[..., :3]
        top += part.height
    return out


def _unit(parts: Iterable[Image.Image], *, fractions: bool) -> np.float32:
    """Return the factor that scales grey values of 16 or 8 bits, or with `fractions` also of 0 to 1, to 8 bits. Raises
    BadImage for other values."""
    extremes = np.array([(values.min(), values.max()) for values in map(np.asarray, parts)], np.float32)
    low, high = float(extremes[:, 0].min()), float(extremes[:, 1].max())
    if not (low >= 0 and high <= 65535):
        raise BadImage(f"values from {low:g} to {high:g}; expected 0 to 65535")
    return np.float32(255 if fractions and high <= 1 else 1 / 257 if high > 255 else 1)


def reason(error: Exception) -> str:
    """Return the decoder's message on one line, without addresses in memory or in source files."""
    text = re.sub(r"decode_jpeg, \S+\.cpp:\d+, | <_io\.BytesIO object at \w+>", "", str(error))
    return " ".join(text.split())[:200] or type(error).__name__
