"""Pictures of the wild are decoded, upright and in their colours, or have a reason."""

import io
from typing import Any

import numpy as np
import pytest
from helpers.pictures import encode, picture
from PIL import Image, ImageCms, PngImagePlugin

from eagleray.data.decode import BadImage, decode

RGB = Image.fromarray(picture(1, 64, 96))
FILE = encode(RGB)
GREY = np.linspace(0, 65535, 64 * 96).reshape(64, 96).astype(np.uint16)


def turned(kind: str, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x112] = orientation
    return encode(RGB, kind, exif=exif)


def with_long_text() -> bytes:
    info = PngImagePlugin.PngInfo()
    info.add_text("prompt", "x" * 2_000_000, zip=True)
    return encode(RGB, "PNG", pnginfo=info)


def frames(kind: str, **options: Any) -> bytes:
    return encode(RGB, kind, save_all=True, append_images=[RGB.rotate(180)], **options)


LAB = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
PICTURES = {
    "a page behind a JPEG": FILE + b"<!-- ad -->" * 50,
    "two JPEGs": FILE + encode(RGB.rotate(90)),
    "MPO": frames("MPO"),
    "a JPEG in CMYK": encode(RGB.convert("CMYK")),
    "a profile of other colours": encode(RGB, icc_profile=LAB),
    "an animated GIF": frames("GIF"),
    "an animated WebP": frames("WEBP"),
    "an animated PNG": frames("PNG"),
    "a GIF with a transparent colour": encode(RGB.convert("P"), "GIF", transparency=0),
    **{f"{kind} of a camera that was held {o}": turned(kind, o) for kind in ("JPEG", "PNG") for o in (0, 9)},
    "a TIFF in CMYK": encode(RGB.convert("CMYK"), "TIFF"),
    "a TIFF in YCbCr": encode(RGB.convert("YCbCr"), "TIFF"),
    "a TIFF with Deflate": encode(RGB, "TIFF", compression="tiff_adobe_deflate"),
    "JPEG 2000": encode(RGB, "JPEG2000"),
    "AVIF": encode(RGB, "AVIF"),
    "BMP": encode(RGB, "BMP"),
    "PPM": encode(RGB, "PPM"),
    "a PNG with a long text": with_long_text(),
}
GREYS = {
    "PNG of 16 bits": encode(Image.fromarray(GREY), "PNG"),
    "PNG of 16 bits, of which 8 are used": encode(Image.fromarray((GREY // 256).astype(np.uint16)), "PNG"),
    "TIFF of 16 bits": encode(Image.fromarray(GREY), "TIFF"),
    "TIFF of 32 bits": encode(Image.fromarray(GREY.astype(np.int32)), "TIFF"),
    "TIFF from 0 to 1": encode(Image.fromarray((GREY / 65535).astype(np.float32)), "TIFF"),
}


@pytest.mark.parametrize("name", PICTURES)
def test_an_odd_picture_is_the_picture(name: str) -> None:
    got = decode(PICTURES[name])
    assert got.shape == (3, 64, 96)
    assert np.abs(got.permute(1, 2, 0).numpy().astype(int) - np.asarray(RGB)).mean() < 20  # of 216 colours


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_a_picture_is_upright_in_every_format(kind: str) -> None:
    got = decode(turned(kind, 6)).permute(1, 2, 0).numpy().astype(int)
    assert np.abs(got - np.rot90(np.asarray(RGB), 3)).mean() < 6


@pytest.mark.parametrize("name", GREYS)
def test_an_odd_grey_picture_has_its_range(name: str) -> None:
    got = decode(GREYS[name])
    assert got.shape == (3, 64, 96)
    assert np.abs(got[0].numpy().astype(int) - GREY // 257).max() <= 1


@pytest.mark.parametrize("size", [(1, 1), (1, 3000), (3000, 1)])
def test_lines_of_pixels_are_pictures(size: tuple[int, int]) -> None:
    assert decode(encode(Image.new("RGB", size), "PNG")).shape == (3, size[1], size[0])


@pytest.mark.parametrize("kind", ["TGA", "ICO", "PCX", "DDS"])
def test_a_format_that_is_not_read_is_said_to_be_none(kind: str) -> None:
    RGB.save(buffer := io.BytesIO(), kind)
    with pytest.raises(BadImage, match="cannot identify image file"):
        decode(buffer.getvalue())
