"""Every operation against torchvision's, for images in a batch that each have their own parameters."""

from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torchvision.transforms.v2 import functional as F

from eagleray.config.view import APPLIED, View
from eagleray.views import photometric
from eagleray.views.colours import MEAN, STD
from eagleray.views.photometric import apply
from eagleray.views.sampling import COLUMNS, Views, photometrics, uniforms

torch.set_num_threads(1)

SIZES = [1, 2, 7, 32]
Op = Callable[[Tensor, Any], Tensor]
OPS: list[Op] = [F.adjust_brightness, F.adjust_contrast, F.adjust_saturation, F.adjust_hue]


def images(count: int, size: int, seed: int = 0) -> Tensor:
    """Noise, with images that are gray, black, white and of one pure colour among it."""
    x = torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    if count >= 5:
        x[0], x[1], x[2, 0], x[2, 1:], x[3] = 0, 255, 255, 0, x[3, :1].clone()
    return x


def params(count: int, **columns: Any) -> Tensor:
    """Parameters (count, 38) with which nothing happens but what is named."""
    out = torch.zeros(count, len(COLUMNS))
    out[:, COLUMNS.index("first") : COLUMNS.index("fourth") + 1] = torch.arange(4.0)
    out[:, COLUMNS.index("brightness") : COLUMNS.index("saturation") + 1] = 1
    out[:, COLUMNS.index("turn0") :][:, : len(APPLIED)] = torch.arange(float(len(APPLIED)))
    for name, value in columns.items():
        out[:, COLUMNS.index(name)] = torch.as_tensor(value, dtype=torch.float32)
    return out


def theirs(image: Tensor, row: Tensor) -> Tensor:
    """One image (3, S, S) through torchvision."""
    p = dict(zip(COLUMNS, row.tolist(), strict=True))
    x = image.float() / 255
    if p["jitter"]:
        for turn in ("first", "second", "third", "fourth"):
            op = int(p[turn])
            x = OPS[op](x, p[COLUMNS[COLUMNS.index("brightness") + op]])
    if p["gray"]:
        x = F.rgb_to_grayscale(x, 3)
    if p["sigma"]:
        x = gaussian(x, p["sigma"])
    if p["solarize"]:
        x = F.solarize(x, 128 / 255)
    if p["flip"]:
        x = F.horizontal_flip(x)
    return F.normalize(x, list(MEAN), list(STD))


def gaussian(x: Tensor, sigma: float) -> Tensor:
    """With 13 taps, or as many as torchvision's reflected border allows for a tiny image."""
    taps = min(13, 2 * x.shape[-1] - 1)
    return F.gaussian_blur(x, [taps, taps], [sigma, sigma])


def normalised(x: Tensor) -> Tensor:
    return F.normalize(x.float() / 255, list(MEAN), list(STD))


def distance(a: Tensor, b: Tensor) -> float:
    """In shares of the full range of a pixel, before it is normalised."""
    assert a.shape == b.shape
    return float(((a - b) * torch.tensor(STD).view(3, 1, 1)).abs().max())


def each(x: Tensor, p: Tensor) -> Tensor:
    return torch.stack([theirs(image, row) for image, row in zip(x, p, strict=True)])


@pytest.mark.parametrize("size", SIZES)
def test_nothing_applied_is_normalise_only(size: int) -> None:
    x = images(6, size)
    before = x.clone()
    assert distance(apply(x, params(6)), normalised(x)) < 1e-6
    assert torch.equal(x, before)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("op", "reference", "low", "high", "tolerance"),
    [
        (photometric.brightness, F.adjust_brightness, 0.0, 2.0, 1e-6),
        (photometric.contrast, F.adjust_contrast, 0.0, 2.0, 1e-6),
        (photometric.saturation, F.adjust_saturation, 0.0, 3.0, 1e-6),
        (photometric.hue, F.adjust_hue, -0.5, 0.5, 1e-5),
    ],
)
def test_jitter_equals_torchvisions(
    op: Op, reference: Op, size: int, low: float, high: float, tolerance: float
) -> None:
    x, factors = images(41, size).float() / 255, torch.linspace(low, high, 41)
    expected = torch.stack([reference(image, f) for image, f in zip(x, factors.tolist(), strict=True)])
    ours = op(x.clone(), factors)
    assert (ours - expected).abs().max() < tolerance
    assert (ours - x).abs().max() > 0.1
    assert ours.min() >= 0
    assert ours.max() <= 1


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("op", ["gray", "solarize", "flip"])
def test_operations_without_a_strength_equal_torchvisions(op: str, size: int) -> None:
    x = images(10, size)
    p = params(10, **{op: 1})
    assert distance(apply(x, p), each(x, p)) < 1e-6
    assert distance(apply(x, p), normalised(x)) > 0.1 or (op, size) == ("flip", 1)


@pytest.mark.parametrize("size", SIZES)
def test_blur_equals_torchvisions(size: int) -> None:
    x = images(30, size)
    p = params(30, sigma=torch.linspace(0.1, 2.0, 30))
    assert distance(apply(x, p), each(x, p)) < 1e-5
    assert size == 1 or distance(apply(x, p), normalised(x)) > 0.1


def test_solarize_inverts_from_128_on() -> None:
    x = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 3, -1, -1)
    expected = torch.where(x >= 128, 255 - x, x)
    assert distance(apply(x, params(1, solarize=1)), normalised(expected)) < 1e-6


@pytest.mark.parametrize("order", list(permutations(range(4)))[::5])
def test_a_chain_of_all_operations_equals_torchvisions_in_every_order(order: tuple[int, ...]) -> None:
    x = images(12, 24, seed=1)
    turns = dict(zip(("first", "second", "third", "fourth"), order, strict=True))
    strengths = {"brightness": 1.2, "contrast": 0.7, "saturation": 1.4, "hue": 0.08, "sigma": 1.1}
    p = params(12, jitter=1, solarize=1, flip=1, **turns, **strengths)
    assert distance(apply(x, p), each(x, p)) < 2e-5
    p = params(12, jitter=1, gray=1, flip=1, **turns, **strengths)
    assert distance(apply(x, p), each(x, p)) < 2e-5


def test_orders_differ() -> None:
    """So that the test above can tell them apart."""
    x = images(12, 24, seed=1)
    strengths = {"jitter": 1, "brightness": 1.3, "contrast": 0.6, "saturation": 1.4, "hue": 0.1}
    chains = [
        apply(x, params(12, **dict(zip(("first", "second", "third", "fourth"), o, strict=True)), **strengths))
        for o in permutations(range(4))
    ]
    assert all(distance(a, b) > 1e-3 for i, a in enumerate(chains) for b in chains[:i])


@pytest.mark.parametrize("size", [1, 7, 32])
def test_every_image_in_a_batch_has_its_own_parameters(size: int) -> None:
    """A batch drawn as in training equals its images one by one, here and in torchvision."""
    views = Views.of([View(count=64, gray=0.3, blur=0.5, solarize=0.3)])
    p = torch.from_numpy(photometrics(views, uniforms(64, seed=0, epoch=0, sample=0)))
    x = images(64, size, seed=2)
    whole = apply(x, p)
    assert distance(whole, torch.cat([apply(x[i : i + 1], p[i : i + 1]) for i in range(64)])) < 1e-6
    assert distance(whole, each(x, p)) < 2e-5
    shuffled = torch.randperm(64)
    assert distance(apply(x[shuffled], p[shuffled]), whole[shuffled]) < 1e-6


def test_taps_reach_three_deviations_of_the_widest_blur() -> None:
    assert 3 * max(View().sigma) <= photometric.TAPS // 2


def test_a_box_becomes_normal_noise_and_the_rest_stays() -> None:
    x = images(4, 32)
    p = params(4)
    p[1, COLUMNS.index("erase_top") :] = torch.tensor([3.0, 5.0, 20.0, 24.0, 77.0])
    out, plain = apply(x, p), apply(x, params(4))
    inside = torch.zeros(4, 3, 32, 32, dtype=torch.bool)
    inside[1, :, 3:23, 5:29] = True
    assert torch.equal(out[~inside], plain[~inside])
    assert abs(out[inside].mean()) < 0.1
    assert abs(out[inside].std() - 1) < 0.1


def test_noise_does_not_depend_on_the_batch() -> None:
    x, p = images(3, 16), params(3)
    p[:, COLUMNS.index("erase_top") :] = torch.tensor([[1.0, 1.0, 8.0, 8.0, seed] for seed in (1.0, 2.0, 1.0)])
    state = torch.get_rng_state()
    whole = apply(x, p)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(whole[2:], apply(x[2:], p[2:]))
    assert torch.equal(whole[0, :, 1:9, 1:9], whole[2, :, 1:9, 1:9])
    assert not torch.equal(whole[0, :, 1:9, 1:9], whole[1, :, 1:9, 1:9])


@pytest.mark.slow
def test_compiled_jitter_is_the_same_and_compiles_once_for_any_order() -> None:
    counters.clear()
    for seed in range(3):
        pixels, view = images(24, 32, seed), View(size=32, jitter=0.8)
        drawn = [photometrics(Views.of([view]), uniforms(1, seed=seed, epoch=0, sample=i)) for i in range(24)]
        rows = torch.cat([torch.from_numpy(p) for p in drawn])
        torch.testing.assert_close(apply(pixels, rows, compiled=True), apply(pixels, rows), atol=1e-5, rtol=1e-5)
        assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
