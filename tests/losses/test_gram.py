"""Gram anchoring compares how similar patches are to each other, not what they are."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from eagleray.losses.gram import gram, gram_loss


def test_it_is_the_mean_squared_difference_of_all_cosines_within_an_image() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(2, 3, 5, 4, dtype=torch.float64)  # 3 images of 5 patches
    total = 0.0
    for image in range(3):
        for a in range(5):
            for b in range(5):
                ours, theirs = (
                    float(z[image, a] @ z[image, b] / z[image, a].norm() / z[image, b].norm()) for z in (x, y)
                )
                total += (ours - theirs) ** 2
    torch.testing.assert_close(gram_loss(x, y), torch.tensor(total / 75, dtype=torch.float64))


def test_it_is_what_numpy_computes_in_float64() -> None:
    """Value and gradient of the loss as the paper's recipe has it, which does not cut negative cosines off."""
    draw = np.random.default_rng(0)
    x, y = draw.standard_normal((2, 3, 7, 5))

    def of_numpy(x: NDArray[np.float64]) -> float:
        u, v = (z / np.linalg.norm(z, axis=-1, keepdims=True) for z in (x, y))
        return float(np.mean((np.einsum("bnd,bmd->bnm", u, u) - np.einsum("bnd,bmd->bnm", v, v)) ** 2))

    patches = torch.tensor(x, requires_grad=True)
    loss = gram_loss(patches, torch.tensor(y))
    (slope,) = torch.autograd.grad(loss, patches)
    assert loss.item() == pytest.approx(of_numpy(x), rel=1e-12)
    towards, h = draw.standard_normal(x.shape), 1e-5
    want = (of_numpy(x + h * towards) - of_numpy(x - h * towards)) / (2 * h)
    assert float((slope.numpy() * towards).sum()) == pytest.approx(want, rel=1e-6)
    cut = torch.nn.functional.mse_loss(gram(patches).clamp(min=0), gram(torch.tensor(y)).clamp(min=0))
    assert abs(cut.item() / loss.item() - 1) > 0.1


def test_a_rotation_of_the_channels_and_a_scale_of_each_patch_cost_nothing() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 6, 4, dtype=torch.float64)
    rotation = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))[0]
    assert gram_loss(3 * (x @ rotation) * torch.rand(2, 6, 1), x) < 1e-24
    assert gram_loss(x.flip(1), x) > 0.01


def test_sums_are_float32_under_autocast() -> None:
    x, y = torch.randn(2, 2, 6, 64)
    with torch.autocast("cpu", torch.bfloat16):
        loss = gram_loss(x.bfloat16(), y.bfloat16())
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, gram_loss(x, y), rtol=0.05, atol=1e-4)


def test_a_small_distance_from_the_anchor_is_that_of_float32_under_autocast() -> None:
    """Cosines rounded to bfloat16 made it three times as large here, and its gradient mostly noise."""
    torch.manual_seed(0)
    x = torch.randn(2, 1, 64) + torch.randn(2, 30, 64)
    anchor = x + 0.01 * torch.randn_like(x)
    x.requires_grad_()
    want = gram_loss(x, anchor)
    with torch.autocast("cpu", torch.bfloat16):
        loss = gram_loss(x, anchor)
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=0)
    slope, expected = (torch.autograd.grad(y, x)[0] for y in (loss, want))
    torch.testing.assert_close(slope, expected, rtol=1e-4, atol=1e-9)
