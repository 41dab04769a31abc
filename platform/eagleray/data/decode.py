"""Decodes image files, JPEG with torchvision and all other formats with PIL, by content and not by file name.

Where torchvision has no decoder of JPEG any more, simplejpeg gives the same pixels.
"""

import re
import warnings
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import torch
from PIL import Image
from torch import Tensor

from eagleray.data.channels import decode_channels
from eagleray.data.pixels import BadImage, open_upright, reason

try:
    from torchvision.io import ImageReadMode, decode_jpeg
except ImportError:  # it is deprecated
    decode_jpeg = None

if TYPE_CHECKING:  # a model in MLflow holds a copy of this file, which has no other files of eagleray
    from eagleray.config.channels import Channel

MAX_PIXELS = 178_956_970  # as PIL's own limit against decompression bombs
# Encoders write about ten scans. Each may take 31 bytes, and as much time to decode as the whole image.
MAX_SCANS = 100
JPEG = b"\xff\xd8"  # the first bytes of such a file
MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")  # in compressed data only 0 and restarts follow 255
FRAME, END, SCAN = 0xC0, 0xD9, 0xDA  # the first kind of a frame header, and the kinds of those markers
SCANS = re.compile(rb"\xff\xda")  # is searched for in 0.4 of the time of bytes.count
EXIF, ORIENTATION = b"Exif\0\0", 0x112


def decode(data: bytes | memoryview, channels: "Sequence[Channel]" = ()) -> Tensor:
    """Decode an image file into an upright uint8 RGB tensor (3, H, W), or with N `channels` into their levels
    (N, H, W). Raises BadImage."""
    try:
        if channels:
            return torch.from_numpy(decode_channels(data, channels))
        return _jpeg(data) if data[:2] == JPEG else _other(data)
    except BadImage:
        raise
    except Exception as e:  # decoders raise whatever they like on broken input
        raise BadImage(reason(e)) from None


def _jpeg(data: bytes | memoryview) -> Tensor:
    if check_jpeg(data)[2] == 4:  # only PIL decodes Adobe's inverted CMYK
        return _other(data)
    if decode_jpeg is None:
        return _of_simplejpeg(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the bytes are read-only, and nobody writes to them
        view = torch.frombuffer(data, dtype=torch.uint8)
    return decode_jpeg(view, ImageReadMode.RGB, apply_exif_orientation=True)


def _of_simplejpeg(data: bytes | memoryview) -> Tensor:
    import simplejpeg

    try:
        pixels = simplejpeg.decode_jpeg(data, "RGB")
    except ValueError:  # of what others only warn about: PIL takes or refuses it
        return _other(data)
    return upright(torch.from_numpy(pixels).permute(2, 0, 1), orientation(data)).contiguous()


def check_jpeg(data: bytes | memoryview) -> tuple[int, int, int]:
    """Return height, width and channels of a JPEG. Raises BadImage for one that would take too much memory or time."""
    height, width, channels = jpeg_size(data)
    if height * width > MAX_PIXELS:
        raise BadImage(f"{width} x {height} pixels, more than {MAX_PIXELS}")
    seeming = sum(1 for _ in islice(SCANS.finditer(data), MAX_SCANS + 1))
    if seeming > MAX_SCANS and (scans := count_scans(bytes(data))) > MAX_SCANS:
        raise BadImage(f"{scans} scans, more than {MAX_SCANS}")
    return height, width, channels


def count_scans(data: bytes) -> int:
    """Return the number of a JPEG's scans. Bytes that only look like one are in thumbnails and, behind the end of the
    image, in the videos that phones put there."""
    scans, found = 0, MARKER.search(data, 2)
    while found and (kind := data[found.end() - 1]) != END:
        scans += kind == SCAN
        length = int.from_bytes(data[found.end() : found.end() + 2])
        # What is below the first frame header has no length for libjpeg where it looks for the next restart.
        found = MARKER.search(data, found.end() + (length if kind >= FRAME else 0))
    return scans


def jpeg_size(data: bytes | memoryview) -> tuple[int, int, int]:
    """Read height, width and channels from a JPEG's frame header. Raises BadImage when there is none."""
    for kind, at in jpeg_segments(data):
        if is_frame(kind):
            return int.from_bytes(data[at + 5 : at + 7]), int.from_bytes(data[at + 7 : at + 9]), data[at + 9]
    raise BadImage("the JPEG ends inside its header")


def is_frame(kind: int) -> bool:
    """Return whether a segment of this kind is a JPEG's frame header."""
    return 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC)


def jpeg_segments(data: bytes | memoryview) -> Iterator[tuple[int, int]]:
    """Yield the kind and the place of each segment of a JPEG's header. Raises BadImage where the header is damaged."""
    at = 2
    while at + 9 < len(data):
        if data[at] != 0xFF:
            raise BadImage("damaged JPEG header")
        kind = data[at + 1]
        if kind == 0xFF:  # a fill byte
            at += 1
            continue
        if kind == 0x01 or 0xD0 <= kind <= 0xD7:  # markers without a length, which libjpeg passes over
            at += 2
            continue
        yield kind, at
        length = int.from_bytes(data[at + 2 : at + 4])
        if kind in (0x00, 0xD8, 0xD9, 0xDA) or length < 2:  # libjpeg reads no length behind 0, either
            raise BadImage("damaged JPEG header")
        at += 2 + length


def _other(data: bytes | memoryview) -> Tensor:
    return torch.from_numpy(open_upright(data)).permute(2, 0, 1)


def orientation(data: bytes | memoryview) -> int:
    """Return how a JPEG's camera was held, 1 to 8 as EXIF counts them; 1 where it does not say. Raises BadImage."""
    for kind, at in jpeg_segments(data):
        if is_frame(kind):
            break
        if kind == 0xE1 and data[at + 4 : at + 10] == EXIF:
            exif = Image.Exif()
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # about damaged tags
                    exif.load(bytes(data[at + 4 : at + 2 + int.from_bytes(data[at + 2 : at + 4])]))
                    found = int(exif.get(ORIENTATION, 1))
            except Exception:  # whatever a damaged table of tags leads to
                return 1
            return found if 1 <= found <= 8 else 1
    return 1


def upright(image: Tensor, turned: int) -> Tensor:
    """Turn or mirror an image (3, H, W) by its EXIF orientation."""
    if turned > 4:
        image = image.mT
    flips = {2: [2], 3: [1, 2], 4: [1], 6: [2], 7: [1, 2], 8: [1]}.get(turned)
    return image.flip(flips) if flips else image
