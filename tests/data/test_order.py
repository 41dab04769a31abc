"""An epoch is a permutation that does not depend on who reads it."""

import functools
import hashlib

import numpy as np
import pytest
from numpy.typing import NDArray

from eagleray.base.errors import UserError
from eagleray.config import bundled
from eagleray.data.order import Epoch, Share, lane_length, lanes_of, rank_rows, rows
from eagleray.runs import recipe as recipes

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
    whole = epoch_order(tuple(sizes), lanes, batch, seed, epoch)
    each, ranks, many = batch // lanes, *split(readers, batch)
    own = [rank_rows(lanes, batch, rank=rank, ranks=ranks) for rank in range(ranks)]
    shares = [[Share(rows, each, reader, many) for reader in range(many)] for rows in own]
    steps = []
    for step, batch_of_step in enumerate(whole):
        parts = [share[0].in_order([given(s, batch_of_step, step) for s in share], step) for share in shares]
        steps.append(np.concatenate([part for rank in parts for part in rank]))
    return np.stack(steps)


@functools.cache
def epoch_order(sizes: tuple[int, ...], lanes: int, batch: int, seed: int, epoch: int) -> NDArray:
    """The samples (steps, batch) of all lanes, side by side."""
    parts = [samples(list(sizes), lanes, batch, number, seed=seed, epoch=epoch) for number in range(lanes)]
    return np.concatenate([part.reshape(-1, batch // lanes) for part in parts], 1)


def split(readers: int, batch: int) -> tuple[int, int]:
    """So many readers as ranks and readers of each, with no more ranks than rows."""
    ranks = next(n for n in range(min(readers, batch), 0, -1) if readers % n == 0)
    return ranks, readers // ranks


def given(share: Share, batch: NDArray, step: int) -> NDArray:
    """What a reader gives of a step: rows of its own lanes alone."""
    rows, lanes = share.at(step), share.lanes
    assert all(row // share.each in lanes for row in rows)
    return batch[rows.start : rows.stop]


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
    for readers in [*range(2, lanes + 3), 64, 768]:
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
    with pytest.raises(ValueError, match="5 readers cannot have a lane each: there are 4"):
        lanes_of(4, reader=0, readers=5)
    with pytest.raises(UserError, match=r"workers=9: more workers than images in a step; .* optim\.batch=8"):
        rows(4, 8, ranks=9)


@pytest.mark.parametrize("readers", [1, 3, 64, 768])
def test_batches_of_a_shipped_size_do_not_depend_on_the_readers(readers: int) -> None:
    """DINO's 1024 images in 128 lanes, as on 64 GPUs with 12 loader processes each."""
    order = epoch_batches([37] * 120, 128, 1024, readers)
    assert np.array_equal(order, epoch_batches([37] * 120, 128, 1024))
    digest = hashlib.sha256(order.astype("<i8").tobytes()).hexdigest()
    assert digest.startswith("8974b93460b5777f")  # as of commit 5baad4b, before lanes were shared: runs continue


@pytest.mark.parametrize(("ranks", "readers"), [(64, 12), (128, 8)])
def test_every_recipe_is_shared_evenly_by_many_readers(ranks: int, readers: int) -> None:
    """Each rank trains on equally many images, but for one lane or row, and over the steps each of its readers reads
    equally many."""
    named = {name: recipes.load(name) for name in bundled.names()}
    for (lanes, batch), name in {(r.data.lanes, r.optim.batch): name for name, r in named.items()}.items():
        images = rows(lanes, batch, ranks=ranks)
        assert sum(images) == batch
        assert max(images) - min(images) <= (1 if ranks > lanes else batch // lanes), name
        for rank in (0, ranks // 2, ranks - 1):
            own = rank_rows(lanes, batch, rank=rank, ranks=ranks)
            shares = [Share(own, batch // lanes, reader, readers) for reader in range(readers)]
            read = [sum(len(share.at(step)) for step in range(readers)) for share in shares]
            assert sum(read) == readers * len(own)
            assert max(read) - min(read) <= (0 if shares[0].takes_turns else readers * batch // lanes), name
