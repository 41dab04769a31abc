"""Images of N channels through the data plane: levels, the same pixels as for red, green and blue, and quarantine."""

import io
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.pictures import encode, picture, write_tar
from helpers.tiffs import BANDS, CHANNELS, scene, tiff, write_scenes
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image

import eagleray
from eagleray.base.errors import UserError
from eagleray.config.channels import Channel
from eagleray.config.view import View
from eagleray.data.channels import levels
from eagleray.data.decode import BadImage, decode
from eagleray.data.index import open_index
from eagleray.data.reader import StepPart, Stream
from eagleray.views.colours import MEAN, STD, colours
from eagleray.views.sampling import Views

# With these, the levels of an image in red, green and blue are its own.
OWN = tuple(Channel(mean=255 * m, std=255 * s) for m, s in zip(MEAN, STD, strict=True))
FIVE = tuple(Channel(**c) for c in CHANNELS)
PLAIN: dict[str, Any] = {"gray": 0.0, "strength": (0.4, 0.4, 0.0, 0.0)}


@given(
    arrays(np.uint16, (3, 4, 5)),
    st.lists(st.tuples(st.floats(-70_000, 70_000), st.floats(0.1, 1e6)), min_size=5, max_size=5),
)
def test_a_level_is_the_value_by_mean_and_deviation(values: np.ndarray, moments: list[tuple[float, float]]):
    channels = [Channel(mean=m, std=s) for m, s in moments]
    mean, std = (np.array(x) for x in zip(*moments, strict=True))
    exact = (255 * (0.5 + 0.25 * (values - mean) / std)).clip(0, 255)
    made = levels(values, channels)
    assert made.dtype == np.uint8
    assert np.abs(made - np.moveaxis(exact, 2, 0)).max() <= 0.51


def test_values_of_the_stated_moments_are_normalised():
    made = torch.from_numpy(levels(np.stack([scene(n) for n in range(0, 50, 5)]).reshape(-1, 32, BANDS), FIVE))
    mean, std = (torch.tensor(x).view(-1, 1, 1) for x in colours(BANDS))
    x = (made / 255 - mean) / std
    assert x.mean((1, 2)).abs().max() < 0.3  # the classes differ by as much
    assert (x.std((1, 2)) - 0.8).abs().max() < 0.1


@given(arrays(np.uint8, (7, 9, 3)))
def test_three_channels_with_the_moments_of_photographs_are_a_photograph(image: np.ndarray):
    png = encode(image, "PNG")
    assert torch.equal(decode(png, OWN), decode(png))
    assert torch.equal(decode(tiff(image), OWN), decode(png))


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 16, 64])
@pytest.mark.parametrize("kind", ["u1", "u2", "f4"])
def test_any_number_of_channels_is_decoded(number: int, kind: str):
    values = np.random.default_rng(number).integers(0, 255, (20, 30, number)).astype(kind)
    image = decode(tiff(values), [Channel(mean=127.5, std=63.75)] * number)
    if number != 3:
        assert torch.equal(image, torch.from_numpy(values.astype(np.uint8)).permute(2, 0, 1))
    assert image.shape == (number, 20, 30)


@pytest.mark.parametrize(("mode", "number"), [("L", 1), ("LA", 2), ("RGBA", 4), ("I;16", 1)])
def test_a_png_has_the_channels_of_its_file(mode: str, number: int):
    values = np.random.default_rng(0).integers(0, 256, (20, 30, number)).astype("u2" if mode == "I;16" else "u1")
    png = encode(Image.fromarray(values.squeeze()), "PNG")
    channels = [Channel(mean=127.5, std=63.75)] * number
    assert torch.equal(decode(png, channels), torch.from_numpy(values.astype(np.uint8)).permute(2, 0, 1))
    with pytest.raises(BadImage, match=f"{number} channels?, expected {number + 1}"):
        decode(png, [*channels, channels[0]])


def test_images_that_would_lose_bits_or_are_no_channels_are_refused():
    import cv2

    deep = cv2.imencode(".png", np.zeros((8, 8, 4), np.uint16))[1].tobytes()
    with pytest.raises(BadImage, match="a PNG of 16 bits in several channels"):
        decode(deep, FIVE[:4])
    palette = encode(Image.fromarray(picture(1)).convert("P"), "PNG")
    with pytest.raises(BadImage, match="mode P, expected channels"):
        decode(palette, FIVE[:1])
    holes = np.full((8, 8, 5), np.nan, np.float32)
    with pytest.raises(BadImage, match="not finite"):
        decode(tiff(holes), FIVE)


@pytest.mark.parametrize("planar", [False, True])
@pytest.mark.parametrize("deflate", [False, True])
def test_five_channels_are_no_photograph(planar: bool, deflate: bool):
    """Pillow shows some of them as the grey of their first channel."""
    with pytest.raises(BadImage, match=r"there is data\.channels"):
        decode(tiff(scene(0).astype(np.uint8), planar=planar, deflate=deflate))


def parts(folder: Path, views: Views, channels: tuple[Channel, ...], **keys: Any) -> list[StepPart]:
    index = open_index(str(folder), note=lambda _: None, channels=channels)
    stream = Stream(index, views, 7, 2, 8, colours=True, **keys)
    return list(islice(stream.parts(range(2), start=0), 6))


def test_a_stream_of_three_channels_is_that_of_photographs_bit_by_bit(tmp_path: Path):
    members = [(f"s{n:03d}.png", encode(picture(n, 20 + n, 30), "PNG")) for n in range(24)]
    write_tar(tmp_path / "x.tar", members)
    views = Views.of([View(size=16, count=2, blur=0.5, solarize=0.5, cutout=0.5, sobel=0.2), View(size=8)])
    for a, b in zip(parts(tmp_path, views, OWN), parts(tmp_path, views, ()), strict=True):
        assert torch.equal(a.index, b.index)
        assert all(torch.equal(x, y) for x, y in zip(a.pixels, b.pixels, strict=True))


def test_an_image_of_other_channels_is_replaced_and_said(tmp_path: Path):
    folder = write_scenes(tmp_path / "shards", 24, broken=2)
    views = Views.of([View(size=16, **PLAIN), View(size=8, **PLAIN)])
    read = parts(folder, views, FIVE)
    assert [p.shape[-3] for part in read for p in part.pixels] == [BANDS] * 12
    bad = {(b.key, b.reason) for part in read for b in part.bad}
    assert bad == {("s0000", "4 channels, expected 5 (its .tif)"), ("s0001", "4 channels, expected 5 (its .tif)")}


def test_a_loop_of_ones_own_reads_channels(tmp_path: Path):
    folder = write_scenes(tmp_path / "shards", 24)
    loader = eagleray.loader(folder, views=[View(size=16, **PLAIN)], batch=8, workers=0, channels=CHANNELS)
    batches = list(loader)
    assert batches[0].views[0].shape == (8, BANDS, 16, 16)
    assert abs(float(torch.cat([b.views[0] for b in batches]).mean())) < 0.3
    with pytest.raises(UserError, match=r"expected views.0.gray=0 views.0.strength=\[0.4,0.4,0,0\]"):
        eagleray.loader(folder, views=[{"size": 16}], batch=8, workers=0, channels=CHANNELS)
    with pytest.raises(UserError, match="decode=scaled: is for JPEGs in red, green and blue; use decode=full"):
        eagleray.loader(folder, views=[View(size=16, **PLAIN)], batch=8, channels=CHANNELS, decode="scaled")
    with pytest.raises(UserError, match="channels"):
        eagleray.loader(folder, views=[{"size": 16}], batch=8, workers=0, channels=[{"mean": 1, "std": 0}])


def test_grey_images_of_sixteen_bits_are_one_channel():
    values = np.random.default_rng(0).normal(1000, 20, (20, 30)).astype(np.uint16)
    Image.fromarray(values).save(file := io.BytesIO(), "PNG")
    image = decode(file.getvalue(), [Channel(mean=1000, std=20)])
    assert image.shape == (1, 20, 30)
    assert 50 < image.float().std() < 70  # 64, where the scale for photographs leaves one level
