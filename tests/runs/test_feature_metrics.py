"""What the numbers about features must be where they are known."""

import math

import pytest
import torch
import torch.nn.functional as F

from eagleray.runs.monitor import alignment, distance, effective_rank, input_moments, spread, uniformity

N, C = 400, 16


@pytest.fixture
def sphere() -> torch.Tensor:
    """Random directions (N, C)."""
    return F.normalize(torch.randn(N, C, generator=torch.Generator().manual_seed(0)), dim=1)


def test_spread_is_one_on_the_sphere_and_zero_for_one_vector(sphere: torch.Tensor):
    assert spread(sphere).item() == pytest.approx(1, abs=0.05)
    assert spread(sphere[:1].expand(N, C)).item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("rank", [1, 4, C])
def test_effective_rank_counts_directions_of_equal_weight(rank: int):
    z = torch.eye(C)[torch.arange(N) % rank]
    assert effective_rank(z).item() == pytest.approx(rank, rel=1e-3)


def test_effective_rank_falls_when_directions_shrink(sphere: torch.Tensor):
    shrunk = sphere * torch.tensor([1.0] * 4 + [0.01] * (C - 4))
    assert effective_rank(shrunk) < effective_rank(sphere) / 2


def test_alignment_is_zero_for_equal_views_and_two_for_unrelated_ones(sphere: torch.Tensor):
    assert alignment(sphere, sphere).item() == 0
    assert alignment(sphere, sphere.roll(1, 0)).item() == pytest.approx(2, abs=0.1)
    assert alignment(sphere, -sphere).item() == pytest.approx(4)


def test_uniformity(sphere: torch.Tensor):
    assert uniformity(sphere[:1].expand(N, C)).item() == pytest.approx(0, abs=1e-5)
    assert uniformity(torch.eye(C)).item() == pytest.approx(-4)  # all at squared distance 2
    assert uniformity(sphere) < -3


def test_input_moments():
    mean, std = input_moments(torch.randn(8, 3, 32, 32) * 3 + 5)
    assert mean.item() == pytest.approx(5, abs=0.1)
    assert std.item() == pytest.approx(3, abs=0.1)


def test_distance_is_that_of_all_as_one_vector():
    a, b = [torch.tensor([3.0, 0.0]), torch.tensor([[0.0]])], [torch.tensor([0.0, 0.0]), torch.tensor([[4.0]])]
    assert distance(a, b).item() == pytest.approx(5 / 4)
    assert distance(b, b).item() == 0
    assert math.isinf(distance(b, [torch.zeros(2), torch.zeros(1, 1)]).item())
