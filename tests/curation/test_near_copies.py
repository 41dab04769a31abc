"""Near copies among vectors: each is near one that stays, and those that stay are not near each other."""

import cv2
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from eagleray.curation import near_copies as module
from eagleray.curation.near_copies import MIRRORED, Likeness, across, near_copies, settle, signs
from eagleray.datasets.measure import phash


def vectors(count: int, seed: int = 0, dim: int = 6) -> Tensor:
    """Few dimensions, so that many are near each other."""
    return functional.normalize(torch.randn(count, dim, generator=torch.Generator().manual_seed(seed)), dim=1)


@pytest.mark.parametrize("threshold", [0.7, 0.95, 1.1])
@pytest.mark.parametrize(("piece", "others"), [(1024, 2**16), (7, 5)])
def test_what_stays_and_what_is_a_copy(
    threshold: float, piece: int, others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PIECE", piece)
    monkeypatch.setattr(module, "OTHERS", others)
    x = vectors(300)
    original, best = near_copies(Likeness(x), threshold)
    similar, stays = x @ x.T, original < 0
    assert stays[0]
    assert best[0] == -1
    assert stays.all() if threshold > 1 else not stays.all()
    among = similar[stays][:, stays].fill_diagonal_(-1)
    assert among.max() < threshold
    for row in range(1, len(x)):
        before = [int(r) for r in stays[:row].nonzero()]
        assert best[row] == pytest.approx(float(similar[row, before].max()), abs=1e-6)
        assert bool(stays[row]) == bool(best[row] < threshold)
        if not stays[row]:
            assert int(original[row]) in before
            assert float(similar[row, original[row]]) == pytest.approx(float(best[row]), abs=1e-6)


def test_a_copy_of_a_copy_is_one_only_if_it_is_near_what_stays() -> None:
    angles = torch.deg2rad(torch.tensor([0.0, 20.0, 40.0, 50.0]))
    x = torch.stack([angles.cos(), angles.sin()], 1)
    original, _ = near_copies(Likeness(x), float(torch.deg2rad(torch.tensor(25.0)).cos()))
    assert original.tolist() == [-1, 0, -1, 2]


def test_hashes_decide_between_what_is_similar() -> None:
    """Of 40 samples with the same features each is a copy of the first one whose hash is within 2 bits of its own."""
    x = functional.normalize(torch.ones(40, 4), dim=1)
    hashes = np.random.default_rng(0).integers(0, 2**6, 40).astype(np.uint64) << np.uint64(40)
    original, best = near_copies(Likeness(x, signs(hashes, x.device), bits=2), 0.9)
    differ = np.bitwise_count(hashes[:, None] ^ hashes)
    assert np.array_equal(signs(hashes, x.device) @ signs(hashes, x.device).T, 64 - 2.0 * differ)
    differ = np.minimum(differ, np.bitwise_count(hashes[:, None] ^ hashes ^ MIRRORED))
    for row in range(40):
        before = [other for other in range(row) if original[other] < 0 and differ[row, other] <= 2]
        assert int(original[row]) in before or (int(original[row]), before) == (-1, [])
        assert best[row] == pytest.approx(1 if before else -1)
    assert 1 < (original < 0).sum() < 40
    everything, _ = near_copies(Likeness(x, signs(hashes, x.device), bits=63), 0.9)
    assert (everything < 0).sum() == 1


def test_a_copy_across_a_border_is_settled_by_what_is_preferred() -> None:
    """0 and 1 are in clusters of their own, 2 is a copy of 1 there; 1 turns out a copy of 0, and 3 is like 1 alone."""
    original, similarity = np.array([-1, -1, 1, -1]), np.full(4, np.nan, np.float32)
    pairs = [np.array([1, 3, 3]), np.array([0, 1, 2]), np.array([0.97, 0.96, 0.99], np.float32)]
    settle(original, similarity, pairs, place=np.arange(4))
    assert original.tolist() == [-1, 0, 0, -1]
    assert similarity[1] == np.float32(0.97)


def test_pairs_between_members_and_others() -> None:
    x = vectors(40)
    one, two, alike = across(Likeness(x), 25, 0.8)
    similar = (x[:25] @ x[25:].T >= 0.8).nonzero()
    assert {(int(a), int(b)) for a, b in zip(one, two, strict=True)} == {(int(a), int(b) + 25) for a, b in similar}
    assert torch.allclose(alike, (x[one] * x[two]).sum(1))


def test_a_mirrored_image_has_the_bits_of_a_mirrored_hash() -> None:
    draw = np.random.default_rng(0)
    for _ in range(20):
        grey = cv2.resize(draw.integers(0, 255, (9, 9)).astype(np.uint8), (64, 64), interpolation=cv2.INTER_CUBIC)
        one, two = (np.uint64(int(phash(image), 16)) for image in (grey, np.ascontiguousarray(grey[:, ::-1])))
        assert np.bitwise_count(one ^ two ^ MIRRORED) <= 8
        assert np.bitwise_count(one ^ two) > 20
