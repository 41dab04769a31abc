"""k-means of unit vectors: what is apart is told apart, on any number of ranks."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.ranks import on_ranks
from torch import Tensor
from torch.nn import functional

from eagleray.base import dist
from eagleray.curation import kmeans


def blobs(each: list[int], dim: int = 16, spread: float = 0.05) -> tuple[Tensor, Tensor]:
    """Vectors around orthogonal directions, shuffled, and which direction each one is around."""
    generator = torch.Generator().manual_seed(0)
    label = torch.repeat_interleave(torch.arange(len(each)), torch.tensor(each))
    label = label[torch.randperm(len(label), generator=generator)]
    x = torch.eye(dim)[label] + spread * torch.randn(len(label), dim, generator=generator)
    return functional.normalize(x, dim=1), label


def same_partition(a: Tensor, b: Tensor) -> bool:
    pairs = {(int(i), int(j)) for i, j in zip(a, b, strict=True)}
    return len(pairs) == len(set(a.tolist())) == len(set(b.tolist()))


def test_groups_are_found_also_from_first_centres_that_are_all_in_one() -> None:
    x, label = blobs([200, 50, 5, 1])
    first = x[label == 0][:4]
    centres = kmeans.kmeans(lambda _: x.split(60), first)
    found, similarity = kmeans.nearest(x, centres)
    assert same_partition(found, label)
    assert torch.allclose(centres.norm(dim=1), torch.ones(4))
    assert torch.allclose(similarity, (x * centres[found]).sum(1))


def test_pieces_do_not_change_the_centres() -> None:
    x, _ = blobs([40] * 6, spread=0.4)
    whole = kmeans.kmeans(lambda _: [x], x[:6], rounds=5)
    torch.testing.assert_close(kmeans.kmeans(lambda _: x.split(17), x[:6], rounds=5), whole)


def centres_of_ranks() -> Tensor:
    x, _ = blobs([200, 50, 5, 1])

    def share(_: int) -> Iterator[Tensor]:
        yield from x[dist.rank() :: dist.size()].split(30)

    return kmeans.kmeans(share, x[:4])


def test_ranks_share_the_vectors(tmp_path: Path) -> None:
    alone = centres_of_ranks()
    for centres in on_ranks(2, centres_of_ranks, tmp_path):
        torch.testing.assert_close(centres, alone)


def test_a_frequent_subject_has_no_more_clusters_above_than_a_rare_one() -> None:
    """Twenty centres of one subject and two of each of three others: one cluster above for each subject."""
    x, label = blobs([20, 2, 2, 2], spread=0.1)
    level = kmeans.upper_level(x, 4, seed=0)
    assert same_partition(level.members, label)


def test_levels_are_named_by_what_is_below() -> None:
    x, label = blobs([64] * 8, spread=0.2)
    lowest = kmeans.kmeans(lambda _: [x], x[:32])
    parents = kmeans.upper_levels(lowest, [8, 2], seed=1)
    assert [len(p) for p in parents] == [len(lowest), 8]
    found = kmeans.nearest(x, lowest)[0]
    middle = parents[0][found]
    assert np.mean([same_partition(middle[label == k], label[label == k]) for k in range(8)]) > 0.7


def test_a_vector_has_a_number_whatever_stands_beside_it() -> None:
    x = blobs([500, 500])[0].numpy()
    numbers = kmeans.numbers_of(x, seed=1)
    assert np.array_equal(kmeans.numbers_of(x[::-1].copy(), seed=1), numbers[::-1])
    assert len(set(numbers.tolist())) == len(x)
    for share in (0.1, 0.5):
        assert abs((numbers < share).mean() - share) < 0.05
    assert abs(np.corrcoef(numbers, kmeans.numbers_of(x, seed=2))[0, 1]) < 0.1


def test_rounds_that_are_done_are_not_done_again() -> None:
    x, _ = blobs([40] * 6, spread=0.4)
    kept: dict[int, Tensor] = {}
    whole = kmeans.kmeans(lambda _: [x], x[:6], keep=kept.__setitem__)
    for done, centres in kept.items():
        assert torch.equal(kmeans.kmeans(lambda _: [x], centres, done=done), whole)


def test_first_centres_are_drawn_in_few_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kmeans, "BEGUN", 8)
    x, _ = blobs([40] * 6, spread=0.4)
    found = kmeans.spread(x, 30, seed=0)
    assert len(found.unique(dim=0)) == len(found) == 30
    assert len(kmeans.spread(torch.ones(50, 16) / 4, 30, seed=0)) == 30


def test_a_few_nearest_centres_come_in_order() -> None:
    x, _ = blobs([40] * 6, spread=0.4)
    labels, similarity = kmeans.nearest_few(x, x[:9], 3)
    order = (x @ x[:9].T).argsort(dim=1, descending=True)
    assert torch.equal(labels, order[:, :3])
    assert torch.allclose(similarity, (x @ x[:9].T).amax(1))
    assert kmeans.nearest_few(x, x[:2], 3)[0].shape == (240, 2)
    assert kmeans.nearest_few(x[:0], x[:9], 3)[0].shape == (0, 3)
