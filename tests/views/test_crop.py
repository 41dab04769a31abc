"""Crops in uint8 are torchvision's, and a mirrored view shows its crop from right to left."""

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as F

from eagleray.config.view import View
from eagleray.views.colours import MEAN, STD
from eagleray.views.crop import centre_crop, crop
from eagleray.views.photometric import apply
from eagleray.views.sampling import COLUMNS, Views, crops, photometrics, uniforms

torch.set_num_threads(1)


def noise(height: int, width: int) -> Tensor:
    return torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def drawn(views: Views, height: int, width: int) -> np.ndarray:
    return crops(views, uniforms(len(views.views), seed=0, epoch=0, sample=0), height, width)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("height", "width"), [(1, 1), (5, 300), (64, 48), (37, 41)])
@pytest.mark.parametrize("strided", [False, True])
def test_crops_equal_torchvisions_bit_for_bit(interpolation: Any, height: int, width: int, strided: bool) -> None:
    """Also for an image whose channels come last in memory, as PIL's do."""
    image = noise(height, width)
    if strided:
        image = image.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    sizes = (16, 7, 40)
    views = Views.of([View(size=s, count=4, interpolation=interpolation) for s in sizes])
    boxes = drawn(views, height, width)
    out = [torch.empty(3, v.size, v.size, dtype=torch.uint8) for v in views.views]
    crop(image, boxes, views.views, out)
    for box, view, got in zip(boxes.tolist(), views.views, out, strict=True):
        mode = InterpolationMode(interpolation)
        assert torch.equal(got, F.resized_crop(image, *box, [view.size] * 2, mode, antialias=True))


def test_interpolations_differ() -> None:
    image, box = noise(40, 40), np.array([[0, 0, 40, 40]])
    a, b = (torch.empty(3, 16, 16, dtype=torch.uint8) for _ in range(2))
    crop(image, box, [View(size=16, interpolation="bilinear")], [a])
    crop(image, box, [View(size=16, interpolation="bicubic")], [b])
    assert not torch.equal(a, b)


def test_a_view_shows_its_crop_and_a_mirrored_view_shows_it_from_right_to_left() -> None:
    """In an image whose red is x and whose green is y, in crops and mirrored crops."""
    height, width, count = 120, 200, 40
    x = (torch.arange(width) + 0.5) / width * 255
    y = (torch.arange(height) + 0.5) / height * 255
    ramp = torch.stack([x.expand(height, width), y.unsqueeze(1).expand(height, width), torch.zeros(height, width)])
    views = Views.of([View(size=32, count=count, jitter=0, gray=0, scale=(0.2, 1.0))])
    boxes = drawn(views, height, width)
    params = photometrics(views, uniforms(count, seed=0, epoch=0, sample=0))
    out = torch.empty(count, 3, 32, 32, dtype=torch.uint8)
    crop(ramp.round().byte(), boxes, views.views, list(out))
    seen = apply(out, torch.from_numpy(params)) * torch.tensor(STD).view(3, 1, 1) + torch.tensor(MEAN).view(3, 1, 1)
    flips = params[:, COLUMNS.index("flip")]
    assert 0 < flips.sum() < count
    at = (torch.arange(32) + 0.5) / 32
    for view, (top, left, h, w), flip in zip(seen, boxes.tolist(), flips, strict=True):
        across = at.flip(0) if flip else at
        assert (view[0] - (left + across * w) / width).abs().max() < 0.02
        assert (view[1] - (top + at * h).unsqueeze(1) / height).abs().max() < 0.02


@pytest.mark.parametrize(("height", "width"), [(60, 90), (90, 60), (33, 47), (20, 300)])
def test_the_evaluation_view_is_the_middle_of_the_resized_image(height: int, width: int) -> None:
    """As PIL resizes and cuts it, to a rounding of the last bit."""
    image = torch.from_numpy(
        np.array(Image.fromarray(np.arange(35, dtype=np.uint8).reshape(5, 7) * 7).resize((width, height)))
    )
    image = torch.stack([image, image.flip(0), image.flip(1)])
    got = centre_crop(image, resize=32, size=28)
    assert got.shape == (3, 28, 28)
    short = min(height, width)
    w, h = int(32 * width / short), int(32 * height / short)
    left, top = round((w - 28) / 2), round((h - 28) / 2)
    pil = Image.fromarray(image.permute(1, 2, 0).numpy()).resize((w, h), Image.Resampling.BICUBIC)
    expected = np.asarray(pil.crop((left, top, left + 28, top + 28))).astype(int)
    assert abs(got.permute(1, 2, 0).numpy() - expected).max() <= 1
