"""The centre of Sinkhorn-Knopp gives its assignments, from a few rows of scores at a time."""

import pytest
import torch
import torch.nn.functional as F

from eagleray.losses import prototypes
from eagleray.losses.prototypes import Scores
from eagleray.losses.sinkhorn import sinkhorn, sinkhorn_center


@pytest.mark.parametrize("rows_at_once", [1, 5, 100])
def test_the_centre_gives_the_assignments(rows_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prototypes, "CPU_CHUNK", 12 * rows_at_once)
    g = torch.Generator().manual_seed(0)
    z, w = F.normalize(torch.randn(9, 4, generator=g), dim=1), torch.randn(12, 4, generator=g)
    for tau in (0.5, 0.04, 0.002):  # exponentials of the last one overflow
        for iterations in (1, 3):
            center = sinkhorn_center(Scores(z, w), tau, iterations)
            ours = ((z @ w.T - center) / tau).softmax(1)
            torch.testing.assert_close(ours, sinkhorn(z @ w.T, tau, iterations), rtol=2e-3, atol=2e-4)


def test_many_iterations_use_every_prototype_equally() -> None:
    g = torch.Generator().manual_seed(1)
    t = Scores(torch.randn(40, 4, generator=g), torch.randn(8, 4, generator=g))
    assigned = prototypes.probabilities(*t, sinkhorn_center(t, 1.0, 100), 1.0)
    torch.testing.assert_close(assigned.mean(0), torch.full((8,), 1 / 8))


def test_no_rows_have_a_centre_of_zero() -> None:
    assert torch.equal(sinkhorn_center(Scores(torch.zeros(0, 3), torch.randn(5, 3)), 0.1, 3), torch.zeros(5))
