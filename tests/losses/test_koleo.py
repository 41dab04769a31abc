"""KoLeo is large where features are near each other, whatever their lengths."""

import pytest
import torch
import torch.nn.functional as F

from eagleray.base import dist
from eagleray.losses.koleo import koleo_loss


def test_lengths_do_not_matter_and_descent_spreads_features() -> None:
    g = torch.Generator().manual_seed(0)
    x = F.normalize(1 + 0.1 * torch.randn(12, 3, generator=g), dim=1)
    scaled = x * torch.rand(12, 1, generator=g).add(0.5)
    torch.testing.assert_close(koleo_loss(scaled, (12,)), koleo_loss(x, (12,)))
    y = x.clone().requires_grad_()
    for _ in range(200):
        [grad] = torch.autograd.grad(koleo_loss(y, (12,)), y)
        y = (y - 0.05 * grad).detach().requires_grad_()
    nearest = [torch.cdist(v, v).fill_diagonal_(9).amin(1).mean() for v in (x, F.normalize(y.detach(), dim=1))]
    assert nearest[1] > 3 * nearest[0]


def test_a_feature_is_compared_with_its_nearest_other_one() -> None:
    x = F.normalize(torch.tensor([[1.0, 0.0], [0.8, 0.6], [-1.0, 0.0]]), dim=1)
    d = torch.tensor([0.4**0.5, 0.4**0.5, (1.8**2 + 0.6**2) ** 0.5])
    torch.testing.assert_close(koleo_loss(x, (3,)), -d.log().mean())


def test_two_equal_features_have_a_finite_loss_and_gradient() -> None:
    x = torch.ones(4, 3, requires_grad=True)
    koleo_loss(x, (4,)).backward()
    assert x.grad.isfinite().all()


def test_two_ranks_find_the_neighbours_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients reach both features of a pair, wherever they are."""
    x, rows = torch.randn(9, 4, generator=torch.Generator().manual_seed(2)).requires_grad_(), (5, 4)
    whole = koleo_loss(x, (9,))
    [want] = torch.autograd.grad(whole, x)
    monkeypatch.setattr(dist, "gather_with_grad", lambda *_: F.normalize(x, dim=1))
    losses = []
    for rank, own in enumerate(x.split(rows)):
        monkeypatch.setattr(dist, "rank", lambda rank=rank: rank)
        losses.append(koleo_loss(own, rows) * len(own) / 9)
    torch.testing.assert_close(sum(losses), whole)
    torch.testing.assert_close(torch.autograd.grad(sum(losses), x)[0], want)
