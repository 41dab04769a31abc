"""Decodes image files, JPEG with simplejpeg and other formats with Pillow. The content tells the format, not the name.

torchvision decodes a JPEG in which simplejpeg finds an error, and every JPEG if simplejpeg is missing. If torchvision
has no JPEG decoder, Pillow decodes. All give the same pixels."""

import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from PIL import Image
from torch import Tensor

from eagleray.data.costs import JPEG, BadImage, check_jpeg, is_frame, jpeg_segments  # noqa: F401  what `decode` raises
from eagleray.data.pixels import decoding, open_upright

try:
    import simplejpeg
except ImportError:  # the environment of a model in MLflow lacks simplejpeg
    simplejpeg = None

try:
    from torchvision.io import ImageReadMode, decode_jpeg
except ImportError:  # torchvision has deprecated this decoder, and may lack it
    decode_jpeg = None

if TYPE_CHECKING:  # no import at run time: a model in MLflow has a copy of this file without the rest of eagleray
    from eagleray.config.channels import Channel

EXIF, ORIENTATION = b"Exif\0\0", 0x112


def decode(data: bytes | memoryview, channels: "Sequence[Channel]" = ()) -> Tensor:
    """Decode an image file into an upright uint8 RGB tensor (3, H, W) or, with N `channels`, into uint8 levels
    (N, H, W). Raises BadImage."""
    with decoding():
        if channels:
            from eagleray.data.channels import decode_channels

            return torch.from_numpy(decode_channels(data, channels))
        return _jpeg(data) if data[:2] == JPEG else _other(data)


def _jpeg(data: bytes | memoryview) -> Tensor:
    if check_jpeg(data)[2] == 4:  # only Pillow decodes Adobe's inverted CMYK
        return _other(data)
    if simplejpeg:
        with suppress(ValueError):  # other decoders only warn about such a file, or refuse it themselves
            pixels = torch.from_numpy(simplejpeg.decode_jpeg(data, "RGB"))
            return upright(pixels.permute(2, 0, 1), orientation(data))
    if decode_jpeg is None:
        return _other(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that the bytes are read-only, but nobody writes to them
        view = torch.frombuffer(data, dtype=torch.uint8)
    return decode_jpeg(view, ImageReadMode.RGB, apply_exif_orientation=True)


def _other(data: bytes | memoryview) -> Tensor:
    return torch.from_numpy(open_upright(data)).permute(2, 0, 1)


def orientation(data: bytes | memoryview) -> int:
    """Return a JPEG's EXIF orientation, 1 to 8; 1 where missing or invalid. Raises BadImage for a damaged header."""
    for kind, at in jpeg_segments(data):
        if is_frame(kind):
            break
        if kind == 0xE1 and data[at + 4 : at + 10] == EXIF:
            exif = Image.Exif()
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # Pillow warns about damaged tags
                    exif.load(bytes(data[at + 4 : at + 2 + int.from_bytes(data[at + 2 : at + 4])]))
                    found = int(exif.get(ORIENTATION, 1))
            except Exception:  # a damaged table of tags may cause any error
                return 1
            return found if 1 <= found <= 8 else 1
    return 1


def upright(image: Tensor, turned: int) -> Tensor:
    """Return an image (3, H, W) turned or mirrored by its EXIF orientation, `turned`."""
    if turned > 4:
        image = image.mT
    flips = {2: [2], 3: [1, 2], 4: [1], 6: [2], 7: [1, 2], 8: [1]}.get(turned)
    return image.flip(flips) if flips else image
