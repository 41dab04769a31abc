"""An image from a stranger cannot start a program, and costs bounded time and memory."""

import contextlib
import io
import os
import struct
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.fuzzing import counts, examples, generators, one_line
from helpers.mutations import change_bytes
from helpers.pictures import encode, picture
from helpers.tiffs import tiff
from PIL import Image
from torchvision.io import decode_jpeg

from eagleray.data import pixels
from eagleray.data.costs import MAX_PIXELS, jpeg_size
from eagleray.data.decode import BadImage, decode
from eagleray.data.pixels import open_upright
from eagleray.views.crop import centre_crop


def in_mode(mode: str) -> Image.Image:
    pixels = picture(1, 40, 56)
    deep = mode == "I;16"
    return Image.fromarray(pixels[..., 0].astype(np.uint16) * 257) if deep else Image.fromarray(pixels).convert(mode)


MODES = {
    "JPEG": ["RGB", "L", "CMYK"],
    "PNG": ["RGB", "L", "P", "1", "LA", "RGBA", "I;16"],
    "WEBP": ["RGB", "RGBA"],
    "GIF": ["P", "L"],
    "TIFF": ["RGB", "L", "CMYK", "1", "I;16"],
    "BMP": ["RGB", "P", "1"],
}
SEEDS = [encode(in_mode(mode), kind) for kind, modes in MODES.items() for mode in modes]
SEEDS += [
    encode(picture(2, 40, 56), progressive=True),
    encode(picture(3, 33, 17), subsampling=0, exif=Image.Exif()),
    encode(picture(4, 40, 56), "TIFF", compression="tiff_lzw"),
    encode(picture(5), "GIF", save_all=True, append_images=[Image.fromarray(picture(6))]),
]


def test_no_sample_starts_ghostscript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    started = tmp_path / "started"
    gs = tmp_path / "gs"
    gs.write_text(f"#!/bin/sh\ntouch {started}\n")
    gs.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(BadImage, match="cannot identify"):
        decode(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 50 50\n%%EndComments\nshowpage\n%%EOF\n")
    assert not started.exists()


def frame(width: int, height: int) -> bytes:
    """A JPEG's frame header of one gray channel."""
    return b"\xff\xc0" + struct.pack(">HBHHBBBB", 11, 8, height, width, 1, 1, 0x11, 0)


@pytest.mark.parametrize("marker", [b"\xff\x01", b"\xff\xd0", b"\xff\xd7"])
def test_markers_without_a_length_do_not_hide_the_size(marker: bytes):
    """libjpeg passes over these two bytes; who reads a length there skips to a header of its own choice."""
    hidden = b"\xff\xd8" + marker + frame(20_000, 20_000)
    hidden += b"\x00" * (2 + int.from_bytes(hidden[4:6]) + 2 - len(hidden)) + frame(16, 16) + b"\x00" * 16
    assert jpeg_size(hidden)[:2] == (20_000, 20_000)
    with pytest.raises(BadImage, match=f"20000 x 20000 pixels, more than {MAX_PIXELS}"):
        decode(hidden)


@pytest.mark.parametrize(
    "header", [b"\xff\x00", b"\xff\xd8", b"\xff\xe0\x00\x00", b"\xff\xe0\x00\x01", b"\xff\xda\x00\x08"]
)
def test_a_header_that_cannot_be_followed_is_damaged(header: bytes):
    with pytest.raises(BadImage, match="damaged JPEG header"):
        jpeg_size(b"\xff\xd8" + header + frame(16, 16) + b"\x00" * 16)


@pytest.mark.parametrize("fill", [b"", b"\xff"])
def test_no_marker_hides_a_size_from_us_that_libjpeg_sees(fill: bytes):
    """Behind each kind of marker stands a header of 64 x 64 pixels, which counts where the marker has no length."""
    inner, outer = (encode(picture(1, side, side))[2:] for side in (64, 16))
    seen = 0
    for kind in range(256):
        data = b"\xff\xd8" + fill + bytes([0xFF, kind]) + struct.pack(">H", len(inner) + 2) + inner + outer
        with contextlib.suppress(BadImage, RuntimeError):
            height, width = jpeg_size(data)[:2]
            assert decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8)).shape[1:] == (height, width)
            seen += 1
    assert seen > 10


def test_a_tile_far_larger_than_its_image_is_not_decoded():
    values = np.zeros((16, 16, 3), np.uint8)
    assert decode(tiff(values, tile=64, deflate=True, t262=2)).shape == (3, 16, 16)
    with pytest.raises(BadImage, match="a TIFF of 16 x 16 pixels in tiles of 4112 x 4112"):
        decode(tiff(values, tile=4112, deflate=True, t262=2))


@pytest.mark.parametrize("seed", range(len(SEEDS)))
def test_rows_that_are_converted_apart_are_the_same(seed: int, monkeypatch: pytest.MonkeyPatch):
    whole = open_upright(SEEDS[seed])
    monkeypatch.setattr(pixels, "AT_ONCE", 200)
    assert np.array_equal(open_upright(SEEDS[seed]), whole)


def test_grey_of_sixteen_bits_takes_little_more_memory_than_its_pixels(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pixels, "AT_ONCE", 2**16)
    data = encode(Image.fromarray(np.arange(2**20, dtype=np.uint32).reshape(1024, 1024).astype(np.uint16)), "PNG")
    tracemalloc.start()
    open_upright(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * 2**20 + 20 * 2**16 + len(data)  # it was 19 times the number of pixels


def test_a_jpeg_of_endless_scans_is_refused_at_once():
    data = encode(picture(1, 64, 64), progressive=True)
    last = data.rindex(b"\xff\xda")
    scan = data[last : data.rindex(b"\xff\xd9")]
    began = time.process_time()
    with pytest.raises(BadImage, match=r"\d+ scans, more than 100"):
        decode(data[:last] + 100_000 * scan + b"\xff\xd9")
    assert time.process_time() - began < 5


def test_bytes_that_look_like_scans_behind_a_jpeg_or_in_its_header_are_none():
    """Phones put a thumbnail before an image, and a video of megabytes behind it."""
    data, video = encode(picture(1, 64, 64)), 200 * b"\xff\xda\x00"
    thumbnail = b"\xff\xe1" + (len(video) + 2).to_bytes(2) + video
    assert torch.equal(decode(data[:2] + thumbnail + data[2:] + video), decode(data))


@pytest.mark.parametrize("before", [b"\xff\xfe\x00\x04\xff\xd9", b"\xff\x02\xff\xff"])
def test_scans_do_not_hide_behind_an_end_in_a_comment_or_a_marker_without_length(before: bytes):
    data = encode(picture(1, 64, 64), progressive=True)
    last = data.rindex(b"\xff\xda")
    scan = data[last : data.rindex(b"\xff\xd9")]
    with pytest.raises(BadImage, match=r"2\d\d scans, more than 100"):
        decode(data[:last] + before + 200 * scan + b"\xff\xd9")


def test_the_middle_of_a_narrow_image_is_evaluated_without_the_rest():
    image = torch.zeros(3, 3_000_000, 1, dtype=torch.uint8)
    image[:, 1_500_000 - 2 : 1_500_000 + 2] = 255
    view = centre_crop(image, resize=36, size=32)  # 972 MB if all of it were resized
    assert view.shape == (3, 32, 32)
    assert view.float().mean() > 200


@pytest.mark.parametrize(("height", "width"), [(40, 319), (319, 40)])
def test_a_panorama_is_evaluated_as_before(height: int, width: int):
    image = torch.from_numpy(picture(1, height, width).copy()).permute(2, 0, 1)
    longer = torch.nn.functional.pad(image, (0, 0, 20, 20) if height > width else (20, 20), mode="constant")
    difference = centre_crop(image, resize=36, size=32).int() - centre_crop(longer, resize=36, size=32).int()
    assert difference.abs().max() <= 4  # the longer side is rounded to whole pixels


def test_sixteen_bits_are_scaled_as_before():
    deep = np.arange(0, 65_536, 64, dtype=np.uint16).reshape(32, 32)
    Image.fromarray(deep).save(buffer := io.BytesIO(), "PNG")
    assert np.array_equal(decode(buffer.getvalue())[0].numpy(), (deep * np.float32(1 / 257)).astype(np.uint8))


def check(data: bytes) -> None:
    """Any bytes are an image within the limits or have a reason, and a JPEG has the size that its header says."""
    image = None
    with one_line(kind=BadImage):
        image = decode(data)
    if image is None:
        return
    channels, height, width = image.shape
    assert (image.dtype, channels) == (torch.uint8, 3)
    assert 0 < height * width <= MAX_PIXELS
    if data.startswith(b"\xff\xd8"):
        assert sorted(jpeg_size(data)[:2]) == sorted((height, width))


@pytest.mark.parametrize("count", counts(300))
def test_mutated_images_end_in_pixels_or_a_reason(count: int | None):
    examples(generators(count).map(lambda rng: change_bytes(rng, rng.choice(SEEDS))), check, count, many=2000)
