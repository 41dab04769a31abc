"""HEIC, AVIF and images of 16 bits: decoded within the limits of all formats, or left out with a reason."""

import contextlib
import struct
import tarfile
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from helpers.pictures import encode, jpeg, picture, write_tar
from numpy.typing import NDArray
from PIL import Image

import eagleray
from eagleray.base.errors import UserError
from eagleray.data import pixels
from eagleray.data.decode import BadImage, decode
from eagleray.data.index import open_index
from eagleray.data.pixels import NO_HEIC, NOT_READ, image_extensions, read_pixels

ORIENTATION = 274
HEIC_HEADER = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"


def heic(image: Image.Image, **options: Any) -> bytes:
    pytest.importorskip("pillow_heif")
    image_extensions()  # registers its format
    return encode(image, "HEIF", quality=90, chroma=444, **options)


def decoded(data: bytes) -> NDArray[np.uint8]:
    return decode(data).permute(1, 2, 0).numpy()


def gray_tiff(values: NDArray[Any]) -> bytes:
    """Write an uncompressed TIFF of one row (W, channels), by the fields of TIFF 6.0."""
    width, channels = values.shape
    kind = {"u": 1, "i": 2, "f": 3}[values.dtype.kind]
    fields = [(256, width), (257, 1), (258, 8 * values.itemsize), (259, 1), (262, 1), (273, 200), (277, channels)]
    fields += [(278, 1), (279, values.nbytes), (339, kind)]
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in fields)
    return (b"II*\0\x08\0\0\0" + struct.pack("<H", len(fields)) + entries).ljust(200, b"\0") + values.tobytes()


@pytest.mark.parametrize("kind", ["HEIF", "AVIF"])
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L"])
def test_heic_and_avif_are_decoded(kind: str, mode: str) -> None:
    image = Image.fromarray(picture(3, 96, 128)).convert(mode)
    data = heic(image) if kind == "HEIF" else encode(image, kind, quality=95, subsampling="4:4:4")
    got = decoded(data)
    assert got.shape == (96, 128, 3)
    assert np.abs(got.astype(int) - np.asarray(image.convert("RGB"))).mean() < 3
    assert (got == read_pixels(data)).all()


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
@pytest.mark.parametrize("kind", ["HEIF", "AVIF"])
def test_heic_and_avif_are_turned_upright_once(kind: str, orientation: int) -> None:
    image, exif = Image.fromarray(picture(1, 64, 96)), Image.Exif()
    exif[ORIENTATION] = orientation
    data = heic(image, exif=exif.tobytes()) if kind == "HEIF" else encode(image, kind, quality=95, exif=exif.tobytes())
    turned = {1: 0, 3: 2, 6: 3, 8: 1}[orientation]
    assert np.abs(decoded(data).astype(int) - np.rot90(np.asarray(image), turned)).mean() < 6


@pytest.mark.parametrize("kind", ["HEIF", "AVIF"])
def test_pixels_are_limited_before_they_are_decoded(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    image = Image.fromarray(picture(1, 64, 96))
    data = heic(image) if kind == "HEIF" else encode(image, kind)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)  # twice as many are refused
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("decoded"))
    with pytest.raises(BadImage, match="decompression bomb"):
        decode(data)


@pytest.mark.parametrize("kind", ["HEIF", "AVIF"])
def test_damage_ends_in_an_image_or_a_reason_and_a_size_that_lies_in_neither_more(kind: str) -> None:
    image = Image.fromarray(picture(1, 64, 96))
    data = heic(image) if kind == "HEIF" else encode(image, kind)
    draw = np.random.default_rng(0)
    for _ in range(60):
        broken = bytearray(data)
        for at in draw.integers(0, len(data), 3):
            broken[at] = draw.integers(256)
        with contextlib.suppress(BadImage):
            assert decode(bytes(broken)).numel() < 2**26
    at = data.index(b"ispe") + 8  # after the version and the flags: width and height
    lie = data[:at] + struct.pack(">II", 16, 16) + data[at + 8 :]
    with contextlib.suppress(BadImage):
        assert decode(lie).shape[1:] in ((16, 16), (64, 96))


def test_heic_without_its_package_is_left_out_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = image_extensions() - pixels.HEIC_EXTENSIONS
    monkeypatch.setattr(pixels, "_formats", lambda: ("JPEG", "PNG"))
    for name in ("tar_scan", "image_folder"):
        monkeypatch.setattr(f"eagleray.data.{name}.image_extensions", lambda: known)
    monkeypatch.setattr("eagleray.datasets.sources.item.image_extensions", lambda: known)
    with pytest.raises(BadImage, match=NO_HEIC):
        decode(HEIC_HEADER)
    write_tar(tmp_path / "shards/x.tar", [("a.jpg", jpeg(1)), ("b.heic", HEIC_HEADER), ("b.json", b"{}")])
    [folder] = eagleray.index(tmp_path / "shards")
    assert folder["left_out"] == [f"not used  1: {NO_HEIC} (b in x.tar)"]
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "a.jpg").write_bytes(jpeg(1))
    (photos / "b.HEIC").write_bytes(HEIC_HEADER)
    card = eagleray.prepare("folder", photos, tmp_path / "out", workers=0)
    assert card["images"] == 1
    assert card["dropped"] == {NO_HEIC: {"count": 1, "examples": ["b"]}}


def test_indexed_heic_is_not_gone_where_its_package_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = image_extensions() - pixels.HEIC_EXTENSIONS
    for name in ("a.jpg", "b.HEIC"):
        (tmp_path / name).write_bytes(jpeg(1))
    monkeypatch.setattr("eagleray.data.image_folder.image_extensions", lambda: known | {"heic"})
    assert len(open_index(str(tmp_path), note=lambda _: None)) == 2
    for module in ("image_folder", "folder_index"):
        monkeypatch.setattr(f"eagleray.data.{module}.image_extensions", lambda: known)
    with pytest.raises(UserError, match=f"b.HEIC: is indexed, but this machine does not read {NO_HEIC}$"):
        open_index(str(tmp_path), note=lambda _: None)


def test_heic_in_a_tar_is_indexed(tmp_path: Path) -> None:
    data = heic(Image.fromarray(picture(1, 64, 96)))
    write_tar(tmp_path / "x.tar", [("a.jpg", jpeg(1)), ("b.heic", data)])
    assert [f["images"] for f in eagleray.index(tmp_path)] == [2]
    with tarfile.open(tmp_path / "x.tar") as tar:
        assert tar.getnames() == ["a.jpg", "b.heic"]


@pytest.mark.parametrize("kind", [".png", ".tiff"])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_sixteen_bits_of_another_library_keep_their_upper_eight(kind: str, channels: int) -> None:
    deep = np.random.default_rng(0).integers(0, 65536, (12, 16, channels)).astype(np.uint16)
    deep[..., 3:] = 65535
    got = decoded(cv2.imencode(kind, deep.squeeze())[1].tobytes())
    rgb = np.repeat(deep, 3, 2) if channels == 1 else deep[..., 2::-1]  # OpenCV's order is blue, green, red
    assert np.abs(got.astype(int) - rgb // 257).max() <= 1


def test_floats_from_0_to_1_fill_the_range() -> None:
    values = np.linspace(0, 1, 20, dtype=np.float32)[:, None]
    assert np.abs(decoded(gray_tiff(values))[0, :, 0].astype(int) - 255 * values[:, 0]).max() <= 1


@pytest.mark.parametrize("values", [[-1.0, 5.0], [0.0, 70000.0], [float("nan"), 1.0], [0.0, float("inf")]])
def test_values_that_have_no_place_in_eight_bits_are_refused(values: list[float]) -> None:
    with pytest.raises(BadImage, match="expected 0 to 65535"):
        decode(gray_tiff(np.array(values, np.float32)[:, None]))


def test_more_channels_than_pillow_reads_are_refused_with_the_reason() -> None:
    with pytest.raises(BadImage, match=NOT_READ):
        decode(gray_tiff(np.zeros((8, 7), np.uint8)))
