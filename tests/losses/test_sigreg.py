"""SIGReg: what an isotropic Gaussian costs, what everything else costs, and the authors' code, lejepa/."""

import math

import pytest
import torch
from helpers.golden_cases import Case, cases
from torch import Tensor

from eagleray.losses.sigreg import directions, epps_pulley, sigreg

CPU = torch.device("cpu")


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@cases("sigreg")
def test_statistics_loss_and_gradient(case: Case):
    """And the directions, which the authors' code draws from the number of the step as well."""
    h, z, a = case.hyper, case["z"].requires_grad_(), case["directions"]
    rows = (len(z),)
    case.check(directions(z.shape[1], h["num_slices"], h["global_step"], CPU), "directions")
    case.check(epps_pulley((z @ a).unsqueeze(0), rows, reach=h["t_max"])[0], "statistics")
    loss = sigreg(z.unsqueeze(0), a, rows, reach=h["t_max"])
    loss.backward()
    case.check(loss, "loss")
    case.check(z.grad, "grad_z")


def test_a_gaussian_costs_what_chance_makes_of_it_whatever_its_size():
    """The expectation is the integral of phi(t) (1 - phi(t)^2): over all t, sqrt(2 pi) - sqrt(2 pi / 3)."""
    want = math.sqrt(2 * math.pi) - math.sqrt(2 * math.pi / 3)
    for n in (64, 1024):
        z = normal(4, n, 16)
        found = sigreg(z, directions(16, 128, 0, CPU), (n,), reach=5.0)
        assert found.item() == pytest.approx(want, rel=0.2)


@pytest.mark.parametrize("change", [lambda z: 0 * z, lambda z: z + 1, lambda z: 2 * z, lambda z: z.sign(), torch.exp])
def test_everything_else_costs_more_and_the_more_samples_say_so(change):
    a = directions(2, 64, 0, CPU)
    few, many = (sigreg(change(normal(1, n, 2)), a, (n,)).item() for n in (100, 1000))
    assert few > 2
    assert many > 5 * few


def test_turning_samples_and_directions_together_changes_nothing():
    z, a = normal(2, 20, 5), directions(5, 8, 0, CPU).double()
    turn, _ = torch.linalg.qr(normal(5, 5))
    torch.testing.assert_close(sigreg(z @ turn, turn.T @ a, (20,)), sigreg(z, a, (20,)))
    torch.testing.assert_close(sigreg(-z, a, (20,)), sigreg(z, a, (20,)))


def test_directions_have_length_one_and_are_those_of_the_step():
    a = directions(7, 5, 3, CPU)
    torch.testing.assert_close(a.norm(dim=0), torch.ones(5))
    assert torch.equal(a, directions(7, 5, 3, CPU))
    assert not torch.equal(a, directions(7, 5, 4, CPU))


def test_bfloat16_keeps_its_loss():
    z, a = normal(2, 20, 5).bfloat16(), directions(5, 8, 0, CPU)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = sigreg(z, a, (20,))
    assert torch.equal(rounded, sigreg(z.float(), a, (20,)))
