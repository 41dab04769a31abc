"""An epoch is a permutation that does not depend on who reads it."""

import numpy as np
import pytest
from numpy.typing import NDArray

from eagleray.data.order import Epoch, lane_length, lanes_of

CASES = [  # block sizes, lanes, batch
    ([7, 1, 30, 4, 4, 12, 9, 2, 25, 6], 6, 12),
    ([100], 4, 8),  # every lane cuts the one block
    ([1] * 50, 5, 10),
    ([40, 3], 1, 7),
    ([16, 16], 8, 32),  # no sample is left out, one step
]
cases = pytest.mark.parametrize(("sizes", "lanes", "batch"), CASES)


def samples(sizes: list[int], lanes: int, batch: int, number: int, *, seed: int = 3, epoch: int = 0) -> NDArray:
    """One lane's samples of an epoch in reading order."""
    starts = np.r_[0, np.cumsum(sizes)]
    runs = Epoch.of(np.array(sizes), seed=seed, epoch=epoch).lane(number, lanes=lanes, batch=batch)
    return np.concatenate([starts[r.block] + r.order(seed=seed, epoch=epoch) for r in runs])


def epoch_batches(
    sizes: list[int], lanes: int, batch: int, readers: int = 1, *, seed: int = 3, epoch: int = 0
) -> NDArray:
    """The global batches (steps, batch) of an epoch, put together from what each reader gives."""
    parts = []
    for reader in range(readers):
        for number in lanes_of(lanes, reader=reader, readers=readers):
            own = samples(sizes, lanes, batch, number, seed=seed, epoch=epoch)
            parts.append(own.reshape(-1, batch // lanes))
    return np.concatenate(parts, 1)


@cases
@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_an_epoch_is_a_permutation(sizes: list[int], lanes: int, batch: int, epoch: int) -> None:
    order = epoch_batches(sizes, lanes, batch, epoch=epoch)
    assert order.shape == (sum(sizes) // batch, batch)
    assert len(np.unique(order)) == order.size > sum(sizes) - batch
    assert order.min() >= 0
    assert order.max() < sum(sizes)


@cases
def test_any_number_of_readers_gives_the_same_batches(sizes: list[int], lanes: int, batch: int) -> None:
    alone = epoch_batches(sizes, lanes, batch)
    for readers in range(2, lanes + 1):
        assert np.array_equal(epoch_batches(sizes, lanes, batch, readers), alone)


@pytest.mark.parametrize("lanes", [1, 2, 7, 64])
def test_lanes_are_owned_once_in_order_and_evenly(lanes: int) -> None:
    for readers in range(1, lanes + 1):
        shares = [lanes_of(lanes, reader=r, readers=readers) for r in range(readers)]
        assert [n for share in shares for n in share] == list(range(lanes))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_other_seeds_and_epochs_have_other_orders() -> None:
    """Blocks move, and samples inside a block too."""
    sizes = [8] * 8
    orders = [epoch_batches(sizes, 4, 8, seed=s, epoch=e) for s in range(3) for e in range(3)]
    for i, a in enumerate(orders):
        for b in orders[:i]:
            assert (a == b).mean() < 0.2
    inside = [epoch_batches([64], 1, 8, epoch=e).flatten() for e in range(2)]
    assert (inside[0] == inside[1]).mean() < 0.2
    assert (inside[0] == np.arange(64)).mean() < 0.2


def test_no_sample_has_a_standing_place() -> None:
    """Over many epochs each comes first as often as chance has it, and is left out sometimes, never always."""
    sizes, epochs = [5] * 6, 3000
    first, left = np.zeros(30), np.zeros(30)
    for epoch in range(epochs):
        order = epoch_batches(sizes, 1, 8, epoch=epoch).flatten()
        first[order[0]] += 1
        left[np.setdiff1d(np.arange(30), order)] += 1
    assert abs(first - epochs / 30).max() < 5 * (epochs / 30) ** 0.5
    even = epochs * 6 / 30  # 6 of 30 are left out each time; of the block that is cut, the last in the shard
    assert (even / 2 < left).all()
    assert (left < even * 2).all()


@cases
def test_runs_of_all_lanes_do_not_overlap(sizes: list[int], lanes: int, batch: int) -> None:
    """So that no byte is fetched twice: every run is a range of one block, and no two share a sample."""
    seen: set[tuple[int, int]] = set()
    length = lane_length(sum(sizes), lanes=lanes, batch=batch)
    for number in range(lanes):
        runs = Epoch.of(np.array(sizes), seed=0, epoch=2).lane(number, lanes=lanes, batch=batch)
        places = [(r.block, i) for r in runs for i in range(r.first, r.last)]
        assert len(places) == length
        assert all(r.first < r.last <= sizes[r.block] for r in runs)
        assert not seen & set(places)
        seen |= set(places)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="batch of 10 cannot be divided into 4 lanes"):
        lane_length(100, lanes=4, batch=10)
    with pytest.raises(ValueError, match="9 samples do not fill one global batch of 10"):
        lane_length(9, lanes=5, batch=10)
    with pytest.raises(ValueError, match="5 readers cannot share 4 lanes"):
        lanes_of(4, reader=0, readers=5)
