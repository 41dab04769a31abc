"""Tests of VICReg: properties of its terms, and golden vectors of lightly's VICRegLoss."""

import pytest
import torch
from helpers.golden_cases import Case, cases, vit

from eagleray.config.schedule import Progress
from eagleray.data.batch import Batch
from eagleray.methods.vicreg import VICReg, terms

N, DIM = 16, 5


@pytest.fixture
def z() -> torch.Tensor:
    """Return the projections (2, N, C) of two views."""
    return torch.randn(2, N, DIM, generator=torch.Generator().manual_seed(0))


def test_collapse_costs_variance_alone():
    one = torch.ones(N, DIM)
    s, v, c = terms(one, one, (N,), eps=0.0225)
    assert (s, c) == (0, 0)
    torch.testing.assert_close(v, torch.tensor(0.85))


def test_whitened_costs_nothing(z: torch.Tensor):
    q, _ = torch.linalg.qr(z[0] - z[0].mean(0))
    white = q * (N - 1) ** 0.5
    for term in terms(white, white, (N,)):
        torch.testing.assert_close(term, torch.tensor(0.0), rtol=0, atol=1e-5)


def test_terms_by_hand(z: torch.Tensor):
    """The channels have standard deviations above and below 1, different in each view."""
    z = z * torch.tensor([0.2, 0.7, 1.0, 1.5, 3.0])
    s, v, c = terms(*z, (N,), eps=0.0)
    torch.testing.assert_close(s, ((z[0] - z[1]) ** 2).sum(1).mean() / DIM)
    stds = torch.cat([view.T.cov(correction=1).diagonal().sqrt() for view in z])
    torch.testing.assert_close(v, torch.stack([(1 - d).clamp(min=0) for d in stds]).mean())
    covs = [view.T.cov(correction=1) for view in z]
    want = sum(cov[i, j] ** 2 for cov in covs for i in range(DIM) for j in range(DIM) if i != j) / DIM
    torch.testing.assert_close(c, want)


def test_a_common_shift_changes_nothing(z: torch.Tensor):
    torch.testing.assert_close(terms(*(z + 2), (N,)), terms(*z, (N,)), rtol=1e-4, atol=1e-5)


def test_bfloat16_keeps_its_loss(z: torch.Tensor):
    """The terms are computed in float32 also under autocast, because bfloat16 statistics are inaccurate."""
    half = z.bfloat16()
    assert terms(*half, (N,)) == terms(*half.float(), (N,))


def test_views_go_alone_and_weights_weigh():
    torch.manual_seed(0)
    method = VICReg(vit(8, 4, 12, 1, 2), dim=6, hidden=10, invariance=2.0, variance=3.0, covariance=5.0)
    x1, x2 = torch.randn(2, 5, 3, 8, 8)
    batch = Batch([x1, x2], torch.empty(0), torch.empty(0), (5,))
    loss = method(batch, Progress(0, 10, 2))["loss"]
    loss.backward()
    s, v, c = terms(method.encoder([x1]), method.encoder([x2]), (5,))
    torch.testing.assert_close(loss, 2 * s + 3 * v + 5 * c)
    assert all(p.grad is not None for p in method.parameters())
    linear = [m for m in method.encoder.head if isinstance(m, torch.nn.Linear)]
    assert [m.out_features for m in linear] == [10, 10, 6]
    assert method.encoder.head[-1] is linear[-1]


@cases("vicreg")
def test_loss(case: Case):
    h = case.hyper
    z1, z2 = case["z1"].requires_grad_(), case["z2"].requires_grad_()
    s, v, c = terms(z1, z2, (len(z1),), eps=h["eps"])
    loss = h["lambda_param"] * s + h["mu_param"] * v + h["nu_param"] * c
    loss.backward()
    case.check(s, "invariance")
    case.check(v, "variance")
    case.check(c, "covariance")
    case.check(loss, "loss")
    case.check(z1.grad, "grad_z1")
    case.check(z2.grad, "grad_z2")
