"""Crops of a JPEG that is decoded at a part of its size are nearly those of the whole, and never enlarged."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.pictures import encode, picture, write_tar
from hypothesis import given
from hypothesis import strategies as some
from PIL import Image
from torch import Tensor

from eagleray.base.errors import UserError
from eagleray.config.view import View
from eagleray.data import decode_crops as decoding
from eagleray.data.decode import ORIENTATION, BadImage, orientation
from eagleray.data.decode_crops import decode_boxes, factor, reduced
from eagleray.data.index import open_index, write_index
from eagleray.data.loader import Loader
from eagleray.data.reader import Stream
from eagleray.views import sampling
from eagleray.views.crop import crop
from eagleray.views.sampling import Views

VIEWS = Views.of([View(size=48, scale=(0.25, 1.0), count=2), View(size=20, scale=(0.05, 0.25), count=3)])
HEIGHT, WIDTH = 480, 640
NEAR, FAR = 4, 10  # levels of 255 by which views differ whose boxes are rounded, and whose boxes are others


def crops(data: bytes, *, scaled: bool, sample: int = 0, views: Views = VIEWS) -> list[Tensor]:
    out = [torch.zeros(3, v.size, v.size, dtype=torch.uint8) for v in views.views]
    image, boxes = decode_boxes(data, views, sampling.uniforms(len(out), seed=0, epoch=0, sample=sample), scaled=scaled)
    crop(image, boxes, views.views, out)
    return out


def differ(a: list[Tensor], b: list[Tensor]) -> float:
    """The largest mean difference of two lists of views, in levels of 255."""
    return max(float((x.float() - y.float()).abs().mean()) for x, y in zip(a, b, strict=True))


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@given(
    some.integers(1, 5000), some.integers(1, 5000), some.integers(0, 2**32), some.sampled_from([16, 32, 96, 224, 518])
)
def test_no_crop_is_enlarged_and_none_leaves_the_image(height: int, width: int, sample: int, size: int) -> None:
    views = Views.of([View(size=size, scale=(0.08, 1.0), count=2), View(size=max(size // 3, 1), scale=(0.05, 0.3))])
    boxes = sampling.crops(views, sampling.uniforms(3, seed=1, epoch=0, sample=sample), height, width)
    by = factor(boxes, views.size)
    small = reduced(boxes, by)
    assert (small[:, :2] >= 0).all()
    assert (small[:, :2] + small[:, 2:] <= (-(-height // by), -(-width // by))).all()
    assert abs(small * by - boxes).max() <= by
    if by > 1:
        assert (small[:, 2:] >= views.size[:, None]).all()
    if by < 8:  # and none would be with a larger factor
        assert (boxes[:, 2:] < 2 * by * views.size[:, None]).any()
    assert (reduced(boxes, 1) == boxes).all()


@pytest.mark.parametrize("turned", range(1, 9))
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}])
def test_views_hardly_differ(turned: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = turned
    data = encode(picture(turned, HEIGHT, WIDTH), exif=exif.tobytes(), quality=95, **options)
    assert orientation(data) == turned
    whole = crops(data, scaled=False, sample=turned)
    assert differ(whole, crops(data, scaled=False, sample=100)) > FAR  # the measure tells crops apart
    monkeypatch.setattr(decoding, "decode", None)  # nothing is decoded as a whole
    assert differ(whole, crops(data, scaled=True, sample=turned)) < NEAR


def test_gray_files_too(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode(Image.fromarray(picture(1, HEIGHT, WIDTH)).convert("L"))
    whole = crops(data, scaled=False)
    monkeypatch.setattr(decoding, "decode", None)
    assert differ(whole, crops(data, scaled=True)) < NEAR


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(encode(picture(1, 60, 80)), id="small"),
        pytest.param(encode(picture(1, HEIGHT, WIDTH), "PNG"), id="png"),
        pytest.param(encode(Image.fromarray(picture(1, HEIGHT, WIDTH)).convert("CMYK")), id="cmyk"),
    ],
)
def test_what_cannot_be_decoded_in_part_is_decoded_as_ever(data: bytes) -> None:
    assert equal(crops(data, scaled=True), crops(data, scaled=False))


@pytest.mark.parametrize("kept", [0.05, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_as_bad_as_ever(kept: float) -> None:
    data = encode(picture(1, HEIGHT, WIDTH))
    cut = data[: int(kept * len(data))]
    with pytest.raises(BadImage) as whole:
        crops(cut, scaled=False)
    with pytest.raises(BadImage) as part:
        crops(cut, scaled=True)
    assert str(part.value) == str(whole.value)


def test_a_file_that_only_the_whole_decoder_forgives_is_decoded_by_it() -> None:
    """Bytes of nothing inside of the compressed data are worth a warning of the library."""
    data = encode(picture(1, HEIGHT, WIDTH), quality=95)
    spoiled = data[: len(data) // 2] + b"\xff\xd0" + data[len(data) // 2 :]
    assert equal(crops(spoiled, scaled=True), crops(spoiled, scaled=False))


@pytest.mark.parametrize(
    "tags", [b"", b"II*\0", b"II*\0\xff\xff\xff\xff", b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03", b"nonsense"]
)
def test_damaged_tags_turn_nothing(tags: bytes) -> None:
    data = encode(picture(1, HEIGHT, WIDTH), exif=b"Exif\0\0" + tags)
    assert orientation(data) == 1
    assert differ(crops(data, scaled=True), crops(data, scaled=False)) < NEAR


def stream(folder: Path, *, scaled: bool) -> Stream:
    return Stream(open_index(str(folder)), VIEWS, seed=0, lanes=2, batch=4, scaled=scaled)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_any_number_of_readers_and_any_start_give_the_same_batches(tmp_path: Path) -> None:
    members = [(f"{i:03d}.jpg", encode(picture(i, HEIGHT + 40 * i, WIDTH))) for i in range(8)]
    write_tar(tmp_path / "a.tar", members)
    write_index(str(tmp_path), note=lambda _: None)

    def batches(workers: int, start: int, *, scaled: bool = True) -> list[Tensor]:
        loader = Loader(stream(tmp_path, scaled=scaled), rank=0, ranks=1, workers=workers, device=torch.device("cpu"))
        return [view for batch, _ in loader.batches(start, 4) for view in batch.views]

    once = batches(0, 0)
    assert equal(batches(3, 0), once)
    assert equal(batches(0, 2), once[2 * len(VIEWS.views) :])
    assert not equal(batches(0, 0, scaled=False), once)


def test_the_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tar(tmp_path / "a.tar", [(f"{i:03d}.jpg", encode(picture(i))) for i in range(8)])
    write_index(str(tmp_path), note=lambda _: None)
    monkeypatch.setattr(decoding, "find_spec", lambda name: None)
    stream(tmp_path, scaled=False)
    with pytest.raises(UserError, match="decode=scaled: needs the package simplejpeg"):
        stream(tmp_path, scaled=True)


def test_boxes_of_one_pixel() -> None:
    boxes = np.array([[0, 0, 1, 1], [5, 7, 9, 3]])
    assert factor(boxes, np.array([1, 1])) == 1
    assert factor(boxes * 8, np.array([1, 1])) == 8
