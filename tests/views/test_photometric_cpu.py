"""The operations on uint8 crops against those on a batch in float32: half a level of 255 apart, for every parameter."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from eagleray.config.view import APPLIED, View
from eagleray.views import photometric, photometric_cpu
from eagleray.views.colours import STD
from eagleray.views.sampling import COLUMNS, Views, photometrics, uniforms

ROUNDING = 0.5 + 0.01  # levels; the hundredth is for float32
MANY = 48
EACH: dict[str, dict[str, Any]] = {
    "brightness": {"jitter": 1, "brightness": torch.linspace(0, 2, MANY)},
    "contrast": {"jitter": 1, "contrast": torch.linspace(0, 2, MANY)},
    "saturation": {"jitter": 1, "saturation": torch.linspace(0, 3, MANY)},
    "hue": {"jitter": 1, "hue": torch.linspace(-0.5, 0.5, MANY)},
    "gray": {"gray": 1},
    "blur": {"sigma": torch.linspace(0.1, 2, MANY)},
    "solarize": {"solarize": 1},
    "flip": {"flip": 1},
    "sobel": {"sobel": 1},
    "noise": {"noise_std": torch.linspace(0.01, 0.3, MANY), "noise_seed": torch.arange(MANY)},
    "rotate": {"quarters": torch.arange(MANY) % 3 + 1},
    "cutout": {"cut_side": 1},
    "recrop": {"recrop_height": 1, "recrop_width": 1},
}


def images(size: int) -> Tensor:
    """Noise, smooth colours, and images that are gray, black, white and of one pure colour."""
    x = torch.randint(0, 256, (MANY, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    x[0], x[1], x[2, 0], x[2, 1:], x[3] = 0, 255, 255, 0, x[3, :1].clone()
    ramp = torch.linspace(0, 255, size).to(torch.uint8)
    x[4:24, 0], x[4:24, 1] = ramp, ramp[:, None]
    return x


def params(**columns: Any) -> Tensor:
    """Parameters (MANY, 38) with which nothing happens but what is named."""
    out = torch.zeros(MANY, len(COLUMNS))
    out[:, COLUMNS.index("first") : COLUMNS.index("fourth") + 1] = torch.arange(4.0)
    out[:, COLUMNS.index("brightness") : COLUMNS.index("saturation") + 1] = 1
    out[:, COLUMNS.index("turn0") :][:, : len(APPLIED)] = torch.arange(float(len(APPLIED)))
    for name, value in columns.items():
        out[:, COLUMNS.index(name)] = torch.as_tensor(value, dtype=torch.float32)
    return out


def drawn(view: View) -> Tensor:
    """Parameters (MANY, 38) as training draws them."""
    u = np.stack([uniforms(1, seed=0, epoch=0, sample=i) for i in range(MANY)])
    return torch.from_numpy(photometrics(Views.of([view]), u)[:, 0])


def levels(x: Tensor, p: Tensor) -> Tensor:
    """Distances in levels of 255 between the two ways to the same views."""
    done = x.clone()
    photometric_cpu.apply_(done, p)
    views = photometric.finish(done, p)
    return (views - photometric.apply(x, p)).abs() * torch.tensor(STD).view(3, 1, 1) * 255


@pytest.mark.parametrize("size", [1, 2, 7, 33])
@pytest.mark.parametrize("op", EACH)
def test_every_operation_is_a_rounding_away_from_the_one_in_float32(op: str, size: int) -> None:
    x, p = images(size), params(**EACH[op])
    assert levels(x, p).max() < ROUNDING
    changed = x.clone()
    photometric_cpu.apply_(changed, p)
    assert not torch.equal(changed, x) or (size == 1 and op in ("flip", "blur", "rotate", "recrop"))


@pytest.mark.parametrize("strength", [(0.4, 0.4, 0.2, 0.1), (0.8, 0.8, 0.8, 0.2)])
def test_drawn_views_are_one_rounding_away_whatever_the_order_of_the_jitter(
    strength: tuple[float, float, float, float],
) -> None:
    p = drawn(View(size=32, strength=strength, blur=0.5, solarize=0.3))
    assert len({tuple(row) for row in p[:, COLUMNS.index("first") :][:, :4].tolist()}) > 12
    apart = levels(images(32), p)
    assert apart.max() < ROUNDING
    assert apart.mean() < 0.26  # a rounding alone has a quarter of a level


def test_without_an_operation_no_bit_changes() -> None:
    x = images(9)
    done = x.clone()
    photometric_cpu.apply_(done, params())
    assert torch.equal(done, x)


def test_a_crop_does_not_depend_on_the_others_of_its_batch() -> None:
    x, p = images(16), drawn(View(size=16, blur=0.5, solarize=0.5))
    together, alone = x.clone(), x.clone()
    photometric_cpu.apply_(together, p)
    for i in range(MANY):
        photometric_cpu.apply_(alone[i : i + 1], p[i : i + 1])
    assert torch.equal(together, alone)


def test_erasing_comes_after_the_rounding() -> None:
    p = drawn(View(size=16))
    p[:, COLUMNS.index("erase_top") :] = torch.tensor([2.0, 3.0, 4.0, 5.0, 99.0])
    x = images(16)
    assert levels(x, p).max() < ROUNDING
    box = photometric.finish(x, p)[:, :, 2:6, 3:8]
    assert torch.equal(box, box[:1].expand_as(box))  # one seed, one noise
    assert box.std() > 0.5
