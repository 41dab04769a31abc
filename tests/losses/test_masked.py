"""Masks are blocks, follow from the step and the image's place alone, and are as large as the authors' are.

The vectors block_masks hold statistics of 4000 masks each that the authors' code drew: MaskingGenerator of
github.com/facebookresearch/dinov2 and ImageFolderMask of github.com/bytedance/ibot.
"""

from random import Random

import numpy as np
import pytest
import torch
from helpers.golden_cases import Case, cases
from numpy.typing import NDArray

from eagleray.base import dist
from eagleray.losses.masked import Masks, block_mask, draw_masks, independent_shares, masks_of, stratified_shares
from eagleray.losses.prototypes import H, Scores

CPU, BOUNDS = torch.device("cpu"), (0.1, 0.5)


def statistics(masks: list[NDArray[np.bool_]]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the mean number of hidden patches and of pairs of neighbours of which one is hidden, and both errors."""
    m = np.stack(masks).astype(int)
    edges = abs(np.diff(m, axis=1)).sum((1, 2)) + abs(np.diff(m, axis=2)).sum((1, 2))
    both = np.stack([m.sum((1, 2)), edges], 1)
    return both.mean(0), both.std(0) / len(m) ** 0.5


@pytest.mark.parametrize("authors", ["ibot", "dinov2"])
@cases("block_masks")
def test_masks_are_drawn_as_the_authors_draw_them(case: Case, authors: str) -> None:
    side, random = case.hyper["side"], Random(1)
    smallest = (side // 3) ** 2 if authors == "ibot" else 4
    for i, share in enumerate(case["asked"].tolist()):
        masks = [block_mask(random, (side, side), int(share * side**2), smallest) for _ in range(800)]
        mean, error = statistics(masks)
        want, theirs = case[authors][i].numpy(), case[f"{authors}_error"][i].numpy()
        assert (abs(mean - want) < 4 * np.hypot(error, theirs) + 0.01 * want).all(), (share, mean, want)


@cases("dinov3_masks")
def test_masks_of_dinov3_hide_as_many_patches_as_asked(case: Case) -> None:
    side, random = case.hyper["side"], Random(1)
    for i, share in enumerate(case["asked"].tolist()):
        masks = [block_mask(random, (side, side), int(share * side**2), 4, exact=True) for _ in range(800)]
        mean, error = statistics(masks)
        want, theirs = case["dinov3"][i].numpy(), case["dinov3_error"][i].numpy()
        assert mean[0] == want[0] == int(share * side**2)
        assert abs(mean[1] - want[1]) < 4 * np.hypot(error[1], theirs[1]) + 0.01 * want[1]


def test_a_mask_hides_no_more_than_asked_and_leaves_some_patch_visible() -> None:
    random = Random(2)
    for grid in ((1, 1), (1, 7), (2, 2), (3, 5), (14, 14)):
        for patches in range(grid[0] * grid[1]):
            mask = block_mask(random, grid, patches, 4)
            assert mask.shape == grid
            assert mask.sum() <= patches


def test_the_share_of_masked_crops_and_of_their_patches() -> None:
    one = independent_shares(4000, 0.5, BOUNDS, 3)
    hidden = one[one > 0]
    assert abs(len(hidden) / one.size - 0.5) < 0.02
    assert abs(hidden.mean() - 0.3) < 0.01
    assert hidden.min() >= 0.1
    assert hidden.max() <= 0.5

    even = stratified_shares(10, 0.5, BOUNDS, 3)
    drawn = np.sort(even[even > 0])
    assert len(drawn) == 10  # of 20 crops
    assert ((drawn - 0.1) // 0.04 == np.arange(10)).all(), "one in each tenth of the bounds"


def draw(step: int, rows: tuple[int, ...] = (5,)) -> Masks:
    return draw_masks(independent_shares(sum(rows), 0.7, BOUNDS, step), (6, 8), 4, rows, step, CPU)


def test_masks_are_the_same_again_and_others_in_another_step() -> None:
    assert torch.equal(draw(4).hidden, draw(4).hidden)
    assert not torch.equal(draw(4).hidden, draw(5).hidden)


def test_masks_do_not_depend_on_the_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = draw(6).hidden.unflatten(0, (2, 5))
    parts = []
    for rank in range(2):
        monkeypatch.setattr(dist, "rank", lambda rank=rank: rank)
        parts.append(draw(6, (2, 3)).hidden.unflatten(0, (2, -1)))
    assert torch.equal(torch.cat(parts, 1), whole)


def test_every_masked_crop_has_the_same_weight() -> None:
    masks = draw(7)
    found = torch.zeros(10 * 48).index_add(0, masks.rows, masks.pairs.weight).view(10, 48).sum(1)
    torch.testing.assert_close(found, masks.hidden.flatten(1).any(1) / 10)
    assert torch.equal(masks.rows, masks.hidden.flatten().nonzero().squeeze(1))


def test_without_a_hidden_patch_the_loss_is_zero() -> None:
    masks = masks_of(np.zeros((4, 2, 2), bool), CPU)
    w, z = torch.randn(6, 3, requires_grad=True), torch.randn(0, 3, requires_grad=True)
    loss = H(Scores(z.detach(), w.detach()), Scores(z, w), masks.pairs, torch.zeros(6), 0.1, 0.1)
    loss.backward()
    assert loss == 0
    assert torch.equal(w.grad, torch.zeros(6, 3))
