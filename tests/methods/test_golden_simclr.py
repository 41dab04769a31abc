"""Tests of SimCLR: properties of its loss, and golden vectors of lightly's NTXentLoss."""

import math

import pytest
import torch
from helpers.golden_cases import Case, cases, vit

from eagleray.base import dist
from eagleray.config.schedule import Progress
from eagleray.data.batch import Batch
from eagleray.methods.simclr import SimCLR, nt_xent

N, DIM, TAU = 7, 12, 0.3


@pytest.fixture
def z() -> torch.Tensor:
    """Return the projections (2, N, C) of two views."""
    return torch.randn(2, N, DIM, generator=torch.Generator().manual_seed(0))


def test_all_alike_is_chance(z: torch.Tensor):
    one = z[:1, :1].expand(2, N, DIM)
    torch.testing.assert_close(nt_xent(*one, TAU, (N,)), torch.tensor(math.log(2 * N - 1)))


def test_orthogonal_images():
    """The positive has cosine 1 and all negatives have cosine 0."""
    loss = nt_xent(torch.eye(N), torch.eye(N), TAU, (N,))
    p = torch.tensor([math.exp(1 / TAU), *[1.0] * (2 * N - 2)])
    p /= p.sum()
    torch.testing.assert_close(loss, -p[0].log())


def test_neither_lengths_nor_the_order_of_views_or_images_matter(z: torch.Tensor):
    want = nt_xent(*z, TAU, (N,))
    order = torch.randperm(N, generator=torch.Generator().manual_seed(1))
    lengths = torch.linspace(0.5, 3, N).unsqueeze(1)
    for z1, z2 in [(z[1], z[0]), (z[0][order], z[1][order]), (z[0] * lengths, z[1])]:
        torch.testing.assert_close(nt_xent(z1, z2, TAU, (N,)), want)
    assert not torch.isclose(nt_xent(z[0], z[1][order], TAU, (N,)), want)


def test_ranks_together_are_one_batch(z: torch.Tensor, monkeypatch: pytest.MonkeyPatch):
    """Loss and gradient of several ranks with unequal numbers of rows equal those of one batch."""
    rows = (4, 1, 2)
    z.requires_grad_()
    want = nt_xent(*z, TAU, (N,))
    [grad] = torch.autograd.grad(want, z)

    whole = torch.nn.functional.normalize(
        z, dim=-1
    )  # in the graph, so that what one rank says of another's rows counts
    total = torch.zeros(())
    for rank, (n, start) in enumerate(zip(rows, (0, 4, 5), strict=True)):
        gathered = iter(whole)
        monkeypatch.setattr(dist, "gather_with_grad", lambda *_, it=gathered: next(it))
        monkeypatch.setattr(dist, "rank", lambda rank=rank: rank)
        total = total + nt_xent(z[0, start : start + n], z[1, start : start + n], TAU, rows) * n / N
    torch.testing.assert_close(total, want)
    torch.testing.assert_close(torch.autograd.grad(total, z)[0], grad)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_both_views_share_the_batch_norm(layers: int):
    method = SimCLR(vit(8, 4, 12, 1, 2), dim=6, hidden=10, layers=layers)
    linear = [m for m in method.encoder.head if isinstance(m, torch.nn.Linear)]
    assert [m.out_features for m in linear] == [10] * (layers - 1) + [6]
    seen = []
    method.encoder.head.register_forward_hook(lambda _, args, out: seen.append(out))
    x = torch.randn(2, 5, 3, 8, 8)
    out = method(Batch(list(x), torch.empty(0), torch.empty(0), (5,)), Progress(0, 10, 2))
    out["loss"].backward()
    assert [len(s) for s in seen] == [10]  # both views in one forward, so that they are centred together
    assert seen[0].mean(0).abs().max() < 1e-5
    assert out["loss"] == nt_xent(seen[0][:5], seen[0][5:], 0.1, (5,))
    assert all(p.grad is not None for p in method.parameters())


@cases("simclr_ntxent")
def test_loss(case: Case):
    z1, z2 = case["z1"].requires_grad_(), case["z2"].requires_grad_()
    loss = nt_xent(z1, z2, case.hyper["temperature"], (len(z1),))
    loss.backward()
    case.check(loss, "loss")
    case.check(z1.grad, "grad_z1")
    case.check(z2.grad, "grad_z2")
