"""Decodes image files, JPEG with torchvision and all other formats with PIL, by content and not by file name."""

import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg

from eagleray.data.channels import decode_channels
from eagleray.data.pixels import BadImage, open_upright, reason

if TYPE_CHECKING:  # a model in MLflow holds a copy of this file, which has no other files of eagleray
    from eagleray.config.channels import Channel

MAX_PIXELS = 178_956_970  # as PIL's own limit against decompression bombs
# Encoders write about ten scans. Each may take 31 bytes, and as much time to decode as the whole image.
MAX_SCANS = 100
JPEG = b"\xff\xd8"  # the first bytes of such a file


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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the bytes are read-only, and nobody writes to them
        view = torch.frombuffer(data, dtype=torch.uint8)
    return decode_jpeg(view, ImageReadMode.RGB, apply_exif_orientation=True)


def check_jpeg(data: bytes | memoryview) -> tuple[int, int, int]:
    """Return height, width and channels of a JPEG. Raises BadImage for one that would take too much memory or time."""
    height, width, channels = jpeg_size(data)
    if height * width > MAX_PIXELS:
        raise BadImage(f"{width} x {height} pixels, more than {MAX_PIXELS}")
    if (scans := bytes(data).count(b"\xff\xda")) > MAX_SCANS:  # in compressed data 0 follows every 255
        raise BadImage(f"{scans} scans, more than {MAX_SCANS}")
    return height, width, channels


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
