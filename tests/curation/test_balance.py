"""Shares of clusters: nobody gets more than there is, and what is left is shared out evenly."""

import numpy as np
import pytest

from eagleray.curation.balance import even, shares


@pytest.mark.parametrize("seed", range(20))
def test_a_total_is_shared_out_evenly(seed: int) -> None:
    draw = np.random.default_rng(seed)
    sizes = draw.integers(0, 50, draw.integers(1, 30)).astype(float)
    total = draw.uniform(0, 1) * sizes.sum()
    got = even(sizes, total)
    assert got.sum() == pytest.approx(total)
    assert (got <= sizes + 1e-9).all()
    poor = got < sizes - 1e-9
    assert np.ptp(got[poor]) < 1e-9 if poor.any() else True, "those that do not get all they have get the same"
    assert not poor.any() or (got[~poor] <= got[poor].max() + 1e-9).all()


def test_everything_is_given_when_it_is_asked_for() -> None:
    assert even(np.array([3.0, 0.0, 5.0]), 8).tolist() == [3, 0, 5]


def test_levels_share_out_from_the_top() -> None:
    """Two subjects, of which one has nine clusters below: each gets half, whatever is below."""
    sizes, members = np.full(10, 100.0), np.array([0] * 9 + [1])
    got = shares(sizes, [members], 180)
    assert got[-1] == pytest.approx(90)
    assert np.allclose(got[:9], 10)
    assert np.allclose(shares(sizes, [], 180), 18)


def test_clusters_without_samples_and_empty_levels_get_nothing() -> None:
    sizes, members, above = np.array([4.0, 0, 6]), np.array([2, 2, 0]), np.array([0, 0, 0])
    got = shares(sizes, [members, above], 8)
    assert got.tolist() == [4, 0, 4]
