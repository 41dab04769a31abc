"""TIFF files of any number of channels: round trips, files of other programs, and files that are meant to hurt."""

import io
import struct
import time
import tracemalloc
import zlib
from pathlib import Path
from random import Random
from typing import Any

import cv2
import numpy as np
import pytest
from helpers.fuzzing import one_line
from helpers.mutations import change_bytes
from helpers.tiffs import tiff
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from eagleray.config.channels import Channel
from eagleray.data.channels import read_channels
from eagleray.data.decode import BadImage, decode
from eagleray.data.tiff import LARGEST, MOST, MOST_PARTS, read_tiff, write_pages

TYPES = ("u1", "u2", "u4", "i1", "i2", "i4", "f4", "f8")


def noise(kind: str, *shape: int) -> NDArray[Any]:
    rng = np.random.default_rng(sum(shape))
    if kind[0] == "f":
        return rng.normal(0, 1000, shape).astype(kind)
    ends = np.iinfo(kind)
    return rng.integers(ends.min, ends.max, shape, kind, endpoint=True)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    kind=st.sampled_from(TYPES),
    shape=st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(1, 16)),
    planar=st.booleans(),
    deflate=st.booleans(),
    part=st.tuples(st.sampled_from([0, 16]), st.integers(0, 45)),
    predictor=st.sampled_from([1, 2, 3]),
    order=st.sampled_from("<>"),
    big=st.booleans(),
)
def test_what_was_written_is_read(
    kind: str,
    shape: tuple[int, int, int],
    planar: bool,
    deflate: bool,
    part: tuple[int, int],
    predictor: int,
    order: str,
    big: bool,
):
    predictor = {(2, "f"): 1, (3, "f"): 3}.get((predictor, kind[0]), min(predictor, 2))
    values = noise(kind, *shape)
    file = tiff(
        values, planar=planar, deflate=deflate, predictor=predictor, tile=part[0], rows=part[1], order=order, big=big
    )
    read = read_tiff(file, shape[2])
    assert read.dtype == values.dtype
    np.testing.assert_array_equal(read, values)


@pytest.mark.parametrize("compression", [1, 5, 8, 32773, 32946])
@pytest.mark.parametrize(("kind", "predictor"), [("u1", 1), ("u1", 2), ("u2", 2), ("f4", 1), ("f4", 3)])
@pytest.mark.parametrize("channels", [3, 4])
def test_files_of_opencv_are_read_as_it_reads_them(
    tmp_path: Path, compression: int, kind: str, predictor: int, channels: int
):
    values = noise(kind, 50, 70, channels)
    path = str(tmp_path / "image.tif")
    keys = [cv2.IMWRITE_TIFF_COMPRESSION, compression, cv2.IMWRITE_TIFF_PREDICTOR, predictor]
    assert cv2.imwrite(path, values, [*keys, cv2.IMWRITE_TIFF_ROWSPERSTRIP, 16])
    swapped: Any = cv2.imread(path, cv2.IMREAD_UNCHANGED)  # in blue, green, red
    np.testing.assert_array_equal(read_tiff(Path(path).read_bytes()), swapped[..., [2, 1, 0, 3][:channels]])


@pytest.mark.parametrize("compression", ["raw", "tiff_lzw", "tiff_adobe_deflate", "packbits", "zstd", "lzma"])
def test_pages_of_grey_are_channels(compression: str):
    values = noise("u2", 20, 30, 4)
    first, *others = (Image.fromarray(np.ascontiguousarray(values[..., i])) for i in range(4))
    first.save(file := io.BytesIO(), "TIFF", save_all=True, append_images=others, compression=compression)
    np.testing.assert_array_equal(read_tiff(file.getvalue(), 4), values)
    np.testing.assert_array_equal(read_tiff(file.getvalue()), values)
    np.testing.assert_array_equal(read_tiff(file.getvalue(), 1), values[..., :1])
    with pytest.raises(BadImage, match="4 channels, expected 5"):
        read_tiff(file.getvalue(), 5)


def test_what_is_written_here_is_read():
    values = noise("f4", 9, 11, 7)
    write_pages(file := io.BytesIO(), values)
    np.testing.assert_array_equal(read_tiff(file.getvalue()), values)


def test_white_that_is_zero_is_turned():
    values = noise("u2", 5, 6, 1)
    np.testing.assert_array_equal(read_tiff(tiff(values, t262=0)), 65_535 - values)


@pytest.mark.parametrize(
    ("tags", "reason"),
    [
        ({"t258": 12}, "values of 12 bits in the format 1"),
        ({"t339": 6}, "values of 16 bits in the format 6"),
        ({"t259": 7}, "compressed by the method 7, expected none, Deflate, LZW or Zstandard"),
        ({"t262": 3}, "a palette, expected channels"),
        ({"t274": 6}, "the orientation 6, of which only 1 is read"),
        ({"t317": 9}, "the predictor 9, which is not read"),
        ({"t278": 1}, "1 strips or tiles, expected 8"),
        ({"t257": 0}, "0 pixels of 5 channels"),
        ({"t278": 0}, "8 x 8 pixels of 5 channels"),
        ({"t257": 2**31, "t278": 2**31}, f"more than {LARGEST} bytes of values"),
        ({"t277": 2**31}, f"more than {LARGEST} bytes of values"),
        ({"t257": 16, "t278": 16}, "cut off: 640 of 1280 bytes"),
    ],
)
def test_other_kinds_are_refused_with_a_reason(tags: dict[str, int], reason: str):
    with pytest.raises(BadImage, match=reason):
        read_channels(tiff(noise("u2", 8, 8, 5), **tags))


def test_a_file_that_is_cut_off_or_changed_anywhere_is_read_or_refused():
    channels = [Channel(mean=1000, std=500)] * 5
    file = tiff(noise("u2", 8, 8, 5), deflate=True, predictor=2)
    cut = [file[:n] for n in range(0, len(file), 7)]
    rng = Random(0)
    for data in (*cut, *(change_bytes(rng, file) for _ in range(500))):
        with one_line(kind=BadImage):
            assert decode(data, channels).shape[0] == 5


def test_a_page_of_countless_tiles_is_refused_at_once():
    began = time.process_time()
    with pytest.raises(BadImage, match=f"66049 strips or tiles, expected {MOST_PARTS} at most"):
        read_tiff(tiff(np.zeros((257, 257, 1), np.uint8), tile=1))
    assert time.process_time() - began < 5


def test_compressed_bytes_are_not_unpacked_beyond_the_size():
    bomb = zlib.compress(bytes(2**28), 9)
    small = tiff(np.zeros((8, 8, 5), np.uint16))
    file = tiff(np.zeros((8, 8, 5), np.uint16), t259=8, t273=len(small), t279=len(bomb)) + bomb
    tracemalloc.start()
    assert read_tiff(file).shape == (8, 8, 5)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


def test_pages_that_lead_to_each_other_end():
    page = tiff(np.zeros((8, 8, 1), np.uint16))
    at = int.from_bytes(page[4:8], "little")
    count = int.from_bytes(page[at : at + 2], "little")
    following = at + 2 + 12 * count
    loop = page[:following] + struct.pack("<I", at) + page[following + 4 :]
    assert read_tiff(loop).shape == (8, 8, 1)
    tables = page[at:following]
    many, end = page, len(page)
    for _ in range(MOST + 1):  # each table leads to the next
        many = many[:following] + struct.pack("<I", len(many)) + many[following + 4 :]
        following = len(many) + len(tables)
        many += tables + bytes(4)
    assert end < len(many)
    with pytest.raises(BadImage, match=f"page {MOST + 1}, expected {MOST}"):
        read_tiff(many)
    with pytest.raises(BadImage, match=f"65535 tags on page 1, expected {MOST}"):
        read_tiff(page[:at] + b"\xff\xff" + page[at + 2 :])
