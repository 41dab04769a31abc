"""Crops of a batch are those that ATen makes of each image on a CPU, bit for bit."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers.pictures import encode
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from eagleray.config.channels import Channel
from eagleray.config.view import View
from eagleray.data.decode import decode
from eagleray.data.packed import Packed, Packer, on_device
from eagleray.data.reader import pixel_buffer
from eagleray.views import crop_batch as resizing
from eagleray.views.crop import crop
from eagleray.views.crop_batch import crop_batch, kernel, weigh
from eagleray.views.sampling import Views

torch.set_num_threads(1)
CPU = torch.device("cpu")
SLOW = (pytest.mark.slow, pytest.mark.timeout(3600))
Boxes = NDArray[np.int64]


def drawn(rng: np.random.Generator, channels: int, most: int) -> Tensor:
    """An image of noise, of extremes, where sums leave the range of a pixel, or of one colour, up to `most` pixels in
    height and width; one in ten is a line."""
    shape = rng.integers(1, most + 1, 2)
    shape[rng.integers(2)] = 1 if rng.random() < 0.1 else shape[0]
    values = [(0, 256), (0, 2), (rng.integers(256), 256)][rng.integers(3)]
    pixels = rng.integers(*values, (*shape, channels), np.uint8) * (255 if values[1] == 2 else 1)
    image = torch.from_numpy(pixels).permute(2, 0, 1)
    return image.contiguous() if rng.random() < 0.5 else image


def placed(rng: np.random.Generator, image: Tensor, views: int) -> Boxes:
    """A box for each view, of one pixel or one line at times."""
    size = np.array(image.shape[1:])
    lengths = 1 + (rng.random((views, 2)) * size).astype(np.int64)
    lengths[rng.random((views, 2)) < 0.05] = 1
    return np.concatenate([(rng.random((views, 2)) * (size - lengths + 1)).astype(np.int64), lengths], 1)


def by_cpu(images: list[tuple[Tensor, Boxes]], views: Views) -> list[Tensor]:
    """The crops of each view, (B, N, S, S)."""
    out = [torch.empty(len(images), len(images[0][0]), s, s, dtype=torch.uint8) for s in views.size.tolist()]
    for row, (image, boxes) in enumerate(images):
        crop(image, boxes, views.views, [view[row] for view in out])
    return out


def sent(images: list[tuple[Tensor, Boxes]], views: Views) -> Packed:
    packer = Packer(views, len(images[0][0]))
    packer.begin(views, len(images))
    for image, boxes in images:
        packer.add(image, boxes)
    return packer.end(pixel_buffer)


def packed(images: list[tuple[Tensor, Boxes]], views: Views) -> Packed:
    """As two readers send them."""
    half, parts = len(images) // 2, []
    for some in (images[:half], images[half:]):
        parts.append(sent(some, views))
    return on_device(parts, CPU)


def by_device(images: list[tuple[Tensor, Boxes]], views: Views) -> list[Tensor]:
    got, joined = [], packed(images, views)
    for row, view in enumerate(views.views):
        got += crop_batch(joined.pixels, joined.boxes[[row]], [view]).unbind()
    return got


def assert_equal(images: list[tuple[Tensor, Boxes]], views: Views) -> None:
    for ours, theirs in zip(by_device(images, views), by_cpu(images, views), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.is_contiguous()


@pytest.mark.parametrize(
    ("images", "most"), [(24, 90), pytest.param(2000, 600, marks=SLOW, id="2000")], ids=lambda value: str(value)
)
def test_crops_equal_those_of_a_cpu(images: int, most: int) -> None:
    """Enlarged, reduced, of lines and of single pixels, in one, three, four and six channels."""
    rng, left = np.random.default_rng(images), images
    while left > 0:
        sizes = rng.choice([1, 2, 7, 16, 32, 96] if images < 100 else [1, 7, 32, 48, 96, 224], 3)
        views = Views.of([View(size=int(s), interpolation=("bilinear", "bicubic")[i % 2]) for i, s in enumerate(sizes)])
        drawn_ones = [drawn(rng, int(rng.choice([1, 3, 3, 4, 6])), most)]
        drawn_ones += [drawn(rng, len(drawn_ones[0]), most) for _ in range(7)]
        assert_equal([(image, placed(rng, image, 3)) for image in drawn_ones], views)
        left -= 8


def test_views_of_one_size_may_be_resized_differently_and_in_many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    views = Views.of([View(size=16, interpolation="bilinear"), View(size=16), View(size=16, interpolation="bilinear")])
    images = [(image, placed(rng, image, 3)) for image in (drawn(rng, 3, 60) for _ in range(9))]
    monkeypatch.setattr(resizing, "AT_ONCE", 2000)
    joined = packed(images, views)
    got = crop_batch(joined.pixels, joined.boxes, views.views)
    assert all(torch.equal(x, y) for x, y in zip(got, by_cpu(images, views), strict=True))


def test_an_image_far_larger_than_its_crops_travels_as_crops() -> None:
    rng, views = np.random.default_rng(0), Views.of([View(size=24), View(size=8, interpolation="bilinear")])
    large, small = torch.from_numpy(rng.integers(0, 256, (3, 100, 80), np.uint8)), drawn(rng, 3, 30)
    boxes = np.array([[0, 0, 90, 80], [3, 4, 50, 60]])
    assert len(sent([(large, boxes)], views).pixels) == 24**2 + 8**2
    near = np.array([[5, 6, 20, 30], [7, 2, 9, 20]])  # what is cut of a large one is small
    assert len(sent([(large, near)], views).pixels) == 20 * 34
    assert_equal([(large, boxes), (large, near), (small, placed(rng, small, 2))], views)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_images_of_sixteen_bits(kind: str) -> None:
    """Grey ones as such, and as levels of a channel."""
    deep = np.linspace(0, 65535, 40 * 50).astype(np.uint16).reshape(40, 50)
    data, boxes = encode(Image.fromarray(deep), kind), np.array([[0, 0, 40, 50], [3, 5, 9, 30]])
    for channels in ((), (Channel(mean=3e4, std=2e4),)):
        image = decode(data, channels)
        assert_equal([(image, boxes), (image, boxes[::-1])], Views.of([View(size=16), View(size=60)]))


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [96, 224, *(pytest.param(n, marks=SLOW) for n in (32, 98, 128, 256, 518))])
def test_no_weight_is_near_the_middle_where_rounding_to_sixteen_bits_could_go_either_way(
    interpolation: Any, size: int
) -> None:
    """So the order of a sum and fused products of float64, which compilers and devices choose, decide nothing."""
    for longest in (64, 480) if size in (96, 224) else range(128, 2049, 128):
        length = torch.arange(max(longest - 127, 1), longest + 1)
        first, weights, bits = weigh(length, longest, size, interpolation)
        exact = exact_weights(length, first, len(weights), size, interpolation) * (1 << bits).unsqueeze(1)
        assert ((exact.abs() % 1) - 0.5).abs().min() > 1e-8
        assert (weights - exact).abs().max() < 0.5
        assert int(weights.abs().max()) < 2**15


def exact_weights(length: Tensor, first: Tensor, taps: int, size: int, interpolation: str) -> Tensor:
    """The weights (K, n, S) as the definition has them."""
    scale = length.double().unsqueeze(1) / size
    pixel = first + torch.arange(taps).view(-1, 1, 1)
    away = (pixel + 0.5 - scale * (torch.arange(size) + 0.5)) / scale.clamp(min=1)
    weights = kernel(away, interpolation) * (pixel < length.unsqueeze(1))
    return weights / weights.sum(0)


def test_the_kernels_are_a_triangle_and_keys_cubic() -> None:
    x = torch.tensor([0, 0.5, 1, 1.5, 2, 3], dtype=torch.double)
    assert kernel(x, "bilinear").tolist() == [1, 0.5, 0, 0, 0, 0]
    assert kernel(-x, "bicubic").tolist() == [1, 0.5625, 0, -0.0625, 0, 0]
    assert math.isclose(sum(kernel(torch.arange(-1, 3) - 0.3, "bicubic").tolist()), 1, abs_tol=1e-6)
