"""Decodes image files, JPEG with torchvision and all other formats with PIL, by content and not by file name."""

import warnings

import torch
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg

from eagleray.data.pixels import BadImage, open_upright, reason

MAX_PIXELS = 178_956_970  # as PIL's own limit against decompression bombs
# Encoders write about ten scans. Each may take 31 bytes, and as much time to decode as the whole image.
MAX_SCANS = 100


def decode(data: bytes | memoryview) -> Tensor:
    """Decode an image file into an upright uint8 RGB tensor (3, H, W). Raises BadImage."""
    try:
        return _jpeg(data) if data[:2] == b"\xff\xd8" else _other(data)
    except BadImage:
        raise
    except Exception as e:  # decoders raise whatever they like on broken input
        raise BadImage(reason(e)) from None


def _jpeg(data: bytes | memoryview) -> Tensor:
    height, width, channels = jpeg_size(data)
    if height * width > MAX_PIXELS:
        raise BadImage(f"{width} x {height} pixels, more than {MAX_PIXELS}")
    if (scans := bytes(data).count(b"\xff\xda")) > MAX_SCANS:  # in compressed data 0 follows every 255
        raise BadImage(f"{scans} scans, more than {MAX_SCANS}")
    if channels == 4:  # only PIL decodes Adobe's inverted CMYK
        return _other(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the bytes are read-only, and nobody writes to them
        view = torch.frombuffer(data, dtype=torch.uint8)
    return decode_jpeg(view, ImageReadMode.RGB, apply_exif_orientation=True)


def jpeg_size(data: bytes | memoryview) -> tuple[int, int, int]:
    """Read height, width and channels from a JPEG's frame header. Raises BadImage when there is none."""
    at = 2
    while at + 9 < len(data):
        if data[at] != 0xFF:
            raise BadImage("damaged JPEG header")
        kind = data[at + 1]
        if kind == 0x01 or 0xD0 <= kind <= 0xD7:  # markers without a length, which libjpeg passes over
            at += 2
            continue
        if 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):
            return int.from_bytes(data[at + 5 : at + 7]), int.from_bytes(data[at + 7 : at + 9]), data[at + 9]
        length = int.from_bytes(data[at + 2 : at + 4])
        if kind in (0xD8, 0xD9, 0xDA) or (length < 2 and kind != 0xFF):
            raise BadImage("damaged JPEG header")
        at += 1 if kind == 0xFF else 2 + length
    raise BadImage("the JPEG ends inside its header")


def _other(data: bytes | memoryview) -> Tensor:
    return torch.from_numpy(open_upright(data)).permute(2, 0, 1)
