"""Tests of the preparation of images, as other libraries are told of it."""

import pytest
import torch
from timm.data import create_transform
from torchvision.transforms import Resize

from eagleray.views.colours import MEAN, STD
from eagleray.views.preprocessing import Preprocessing


@pytest.mark.parametrize(("size", "resize"), [(224, 256), (96, 110), (32, 32), (16, 19), (64, 73), (518, 592)])
def test_timm_resizes_to_as_many_pixels(size: int, resize: int):
    told = Preprocessing(size=size, resize=resize).timm()
    transform = create_transform(**{**told, "input_size": tuple(told["input_size"])})
    resizing = next(t for t in transform.transforms if isinstance(t, Resize))
    assert resizing.size in (resize, [resize], (resize, resize))
    assert resizing.interpolation.value == "bicubic"


def test_it_is_what_an_evaluation_does():
    image = torch.randint(256, (3, 50, 70), dtype=torch.uint8)
    made = Preprocessing(size=50, resize=50)(image)
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
    torch.testing.assert_close(made, (image[:, :, 10:60] / 255 - mean) / std)
