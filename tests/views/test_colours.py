"""Operations on images of any number of channels, on the device and on crops."""

from typing import Any

import numpy as np
import pytest
import torch

from eagleray.base.errors import UserError
from eagleray.config.channels import Channel, check_operations
from eagleray.config.view import View
from eagleray.views import photometric, photometric_cpu
from eagleray.views.colours import MEAN, STD, colours
from eagleray.views.sampling import Views, photometrics, uniforms

MANY = 32
ALL: dict[str, Any] = {"gray": 0.0, "strength": (0.4, 0.4, 0, 0), "blur": 0.5, "solarize": 0.3, "jitter": 0.8}


def test_three_channels_are_those_of_imagenet():
    assert colours(3) == (MEAN, STD)
    assert colours(2) == ((0.5, 0.5), (0.25, 0.25))


@pytest.mark.parametrize("channels", [1, 2, 4, 5, 16, 64])
@pytest.mark.parametrize("size", [7, 32])
def test_both_ways_to_a_view_are_a_rounding_apart(channels: int, size: int):
    view = View(size=size, cutout=0.3, sobel=0.2, noise=0.3, rotate=0.3, recrop=0.3, **ALL)
    u = np.stack([uniforms(1, seed=0, epoch=0, sample=i) for i in range(MANY)])
    p = torch.from_numpy(photometrics(Views.of([view]), u)[:, 0])
    x = torch.randint(0, 256, (MANY, channels, size, size), dtype=torch.uint8)
    done = x.clone()
    photometric_cpu.apply_(done, p)
    apart = (photometric.finish(done, p) - photometric.apply(x, p)).abs() * 0.25 * 255
    assert apart.max() < 0.52
    assert not torch.equal(done, x)


@pytest.mark.parametrize("channels", [2, 5])
def test_contrast_pulls_to_the_mean_of_all_channels(channels: int):
    x = torch.rand(4, channels, 8, 8)
    none = photometric.contrast(x, torch.zeros(4))
    assert torch.allclose(none, x.mean((1, 2, 3), keepdim=True).expand_as(x), atol=1e-6)
    crop = (255 * x[0]).permute(1, 2, 0).contiguous().numpy()
    photometric_cpu.contrast_(crop, 0.0)
    assert np.allclose(crop, 255 * float(x[0].mean()), atol=1e-3)


def test_pixels_of_a_channel_are_normalised_by_a_half_and_a_quarter():
    x = torch.tensor([0, 255], dtype=torch.uint8).view(1, 1, 1, 2).expand(3, 5, 1, 2).contiguous()
    assert torch.equal(photometric.normalise(x, torch.device("cpu"))[2, 4, 0], torch.tensor([-2.0, 2.0]))


def test_operations_of_colours_are_refused_with_the_keys_to_set():
    channels = [Channel(mean=0, std=1)] * 5
    views = [View(), View(gray=0, jitter=0), View(gray=0, strength=(0.8, 0.8, 0, 0.1))]
    with pytest.raises(UserError) as e:
        check_operations(views, channels)
    assert str(e.value).endswith(
        "got 5; expected views.0.gray=0 views.0.strength=[0.4,0.4,0,0] views.2.strength=[0.8,0.8,0,0]"
    )
    check_operations(views, channels[:3])
    check_operations(views, ())
    with pytest.raises(UserError, match=r"views.0.randaugment=rand-m9: needs 3 channels, got 5"):
        check_operations([View(randaugment="rand-m9", jitter=0)], channels)
