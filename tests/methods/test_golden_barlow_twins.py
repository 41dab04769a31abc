"""Tests of Barlow Twins: properties of its loss, and golden vectors of lightly's BarlowTwinsLoss."""

import pytest
import torch
from helpers.golden_cases import Case, cases, vit
from torch import Tensor

from eagleray.config.schedule import Progress
from eagleray.data.batch import Batch
from eagleray.methods.barlow_twins import BarlowTwins, barlow

N, DIM, LAMBDA = 16, 5, 0.1


def white() -> Tensor:
    """Return channels (N, C) of mean 0, variance 1 and no correlation."""
    z = torch.randn(N, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    q, _ = torch.linalg.qr(z - z.mean(0))
    return (q * N**0.5).float()


@pytest.mark.parametrize(
    ("other", "want"),
    [
        pytest.param(lambda z: z, 0, id="same"),
        pytest.param(lambda z: -z, 4 * DIM, id="opposite"),
        pytest.param(lambda z: z.roll(1, 1), DIM * (1 + LAMBDA), id="shifted"),
        pytest.param(lambda z: z[:, :1].expand_as(z), DIM - 1 + LAMBDA * (DIM - 1), id="one"),
    ],
)
def test_uncorrelated_channels(other, want: float):
    """The channels have correlations of 0, 1 and -1 by construction."""
    z = white()
    loss = barlow(z, other(z), LAMBDA, (N,), eps=0.0)
    torch.testing.assert_close(loss, torch.tensor(float(want)), rtol=1e-4, atol=1e-4)


def test_neither_scale_nor_shift_of_a_channel_matters():
    z1, z2 = torch.randn(2, N, DIM, generator=torch.Generator().manual_seed(1))
    scale, shift = torch.linspace(0.5, 3, DIM), torch.linspace(-2, 2, DIM)
    want = barlow(z1, z2, LAMBDA, (N,))
    torch.testing.assert_close(barlow(z1 * scale + shift, z2, LAMBDA, (N,)), want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(barlow(z1, z2 * scale + shift, LAMBDA, (N,)), want, rtol=1e-4, atol=1e-4)


def test_collapsed_channels_count_as_uncorrelated():
    """Loss and gradient stay finite for channels whose variance is zero."""
    z = torch.ones(N, DIM, requires_grad=True)
    loss = barlow(z, z, LAMBDA, (N,))
    loss.backward()
    assert loss == DIM
    assert z.grad is not None
    assert torch.isfinite(z.grad).all()


def test_bfloat16_keeps_its_loss():
    """The loss is computed in float32 also under autocast, because sums over many rows in bfloat16 are inaccurate."""
    z = white().bfloat16()
    torch.testing.assert_close(barlow(z, z, LAMBDA, (N,)), barlow(z.float(), z.float(), LAMBDA, (N,)), rtol=0, atol=0)


def test_views_go_alone_and_lambda_weighs():
    torch.manual_seed(0)
    method = BarlowTwins(vit(8, 4, 12, 1, 2), dim=6, hidden=10, off_diagonal=0.5)
    x1, x2 = torch.randn(2, 5, 3, 8, 8)
    batch = Batch([x1, x2], torch.empty(0), torch.empty(0), (5,))
    loss = method(batch, Progress(0, 10, 2))["loss"]
    loss.backward()
    torch.testing.assert_close(loss, barlow(method.encoder([x1]), method.encoder([x2]), 0.5, (5,)))
    assert all(p.grad is not None for p in method.parameters())
    linear = [m for m in method.encoder.head if isinstance(m, torch.nn.Linear)]
    assert [m.out_features for m in linear] == [10, 10, 6]
    assert method.encoder.head[-1] is linear[-1]


@cases("barlow_twins")
def test_loss(case: Case):
    h = case.hyper
    z1, z2 = case["z1"].requires_grad_(), case["z2"].requires_grad_()
    loss = barlow(z1, z2, h["lambda_param"], (len(z1),), eps=h["bn_eps"])
    loss.backward()
    case.check(loss, "loss")
    case.check(z1.grad, "grad_z1")
    case.check(z2.grad, "grad_z2")
